"""Ranks that go wrong alone: what they say, what the others say, and that nobody waits for ever."""

from __future__ import annotations

import signal

import pytest

from tests.broad import broad
from tests.runtime.launch import Run, launch

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.timeout(600)]

STOPPED = 3  # the exit code of a rank that was told why


def go_wrong(way: str, ranks: int = 2, torchrun: bool = False) -> Run:
    ended = launch("tests.processes.failure:run", way, ranks=ranks, timeout_s=300, torchrun=torchrun)
    assert not ended.timed_out and not ended.ok, ended
    return ended


def check(way: str, *said: str) -> None:
    """Rank 1 gets the error, rank 0 a PeerError with the same text."""
    ended = go_wrong(way)
    assert [end.code for end in ended.ranks] == [STOPPED, STOPPED], ended
    assert ended.ranks[0].out.startswith("PeerError: rank 1"), ended
    for text in said:
        assert text in ended.ranks[1].out, ended


def test_other_values_on_two_ranks() -> None:
    ended = go_wrong("other_values")
    for end in ended.ranks:
        assert "InputError: ranks 0 and 1 passed different inputs" in end.out and 'inputs="local"' in end.out, ended


def test_another_shape_on_one_rank() -> None:
    check("other_shape", "InputError", "x float32 [5, 24]", "x float32 [6, 24]", 'inputs="local"')


@pytest.mark.broad
def test_another_shape_on_one_rank_at_the_first_call() -> None:
    check("other_shape_at_first", "InputError", "x float32 [5, 24]", "x float32 [6, 24]")


@pytest.mark.broad
def test_another_dtype_on_one_rank() -> None:
    check("other_dtype", "InputError", "x float64 [6, 24]", "x float32 [6, 24]")


def test_another_mode_on_one_rank() -> None:
    """The flags by name, with both values, and not the inputs, which are alike."""
    check(
        "other_mode",
        "StateError: ranks differ in the modules in evaluation (training=False): this rank has all ", ", rank 0 has none",
        "the parameters that take no gradient (requires_grad=False): this rank has down.weight; down.bias, rank 0 has none",
        "call model.train() and model.eval() alike on every rank",
    )


def test_a_program_that_is_called_in_a_forked_worker() -> None:
    """Refused there, and the ranks go on."""
    ended = go_wrong("in_a_worker")
    for end in ended.ranks:
        assert "was forked from the one that has the program" in end.out and "num_workers=0" in end.out, ended
        assert "StateError: the end" in end.out and end.code == STOPPED, ended


@pytest.mark.broad
def test_another_structure_on_one_rank() -> None:
    check("other_structure", "InputError", "x float32 [4, 8], extra float32 [4, 8]")


def test_another_model_on_one_rank() -> None:
    check("other_model", "StateError", "the model", "[40, 24]", "[44, 24]")


@pytest.mark.broad
def test_another_setting_of_torch_on_one_rank() -> None:
    said = "ranks differ in torch's settings: this rank has default dtype: torch.float64, rank 0 has default dtype: torch.float32"
    check("other_setting", "StateError", said)


def test_other_code_on_one_rank() -> None:
    """The message says what may be behind it."""
    check("other_code", "StateError", "the compiled program", "the model's modules: this rank has (norm): LayerNorm((24,), eps=0.001")


def test_a_compilation_that_fails_on_one_rank() -> None:
    check("compile_fails", "CaptureError", "Data-dependent", "failure.py:")


@pytest.mark.parametrize("way", ["other_outputs", broad("other_outputs_at_first")])
def test_backward_from_other_outputs_on_one_rank(way: str) -> None:
    check(way, "StateError", "the outputs that backward starts from: this rank has length", "rank 0", "from the same outputs on every rank")


def test_a_world_of_another_size() -> None:
    ended = go_wrong("wrong_world", ranks=4)
    assert "the mesh dp=2 has 2 ranks, but 4 were started" in ended.ranks[0].out, ended


@pytest.mark.parametrize("torchrun", [False, broad(True)])
def test_a_rank_that_is_killed_in_a_step(torchrun: bool) -> None:
    """The other says who died and where, within 30 s, and does not exit with 0."""
    ended = go_wrong("killed", torchrun=torchrun)
    text = ended.ranks[0].out + ended.ranks[0].err
    assert "rank 1 died at step" in text, ended
    assert any(word in text for word in ("all_reduce", "run main", "compare inputs", "call")), ended
    if not torchrun:
        assert ended.ranks[1].code == -signal.SIGKILL and ended.ranks[0].code == STOPPED, ended
        assert ended.ranks[0].seconds - ended.ranks[1].seconds < 30, ended


@pytest.mark.parametrize("ranks", [broad(2), 4])
def test_a_rank_that_is_killed_in_a_pipeline(ranks: int) -> None:
    """Those that exchange nothing with it learn of it too: all others say who died, within 30 s."""
    ended = go_wrong("killed_in_a_pipeline", ranks)
    assert ended.ranks[1].code == -signal.SIGKILL, ended
    for rank in {*range(ranks)} - {1}:
        end = ended.ranks[rank]
        assert end.code == STOPPED and "PeerError: rank 1 died at step" in end.out, ended
        assert end.seconds - ended.ranks[1].seconds < 30, ended


@pytest.mark.broad
def test_a_rank_that_raises_in_a_pipeline() -> None:
    ended = go_wrong("raises_in_a_pipeline", 4)
    first = ended.ranks[1]
    assert first.code not in (0, STOPPED) and "ValueError: nothing left" in first.err, ended
    for rank in (0, 2, 3):
        end = ended.ranks[rank]
        assert end.code == STOPPED and "PeerError: rank 1 failed at step 1, run backward_1 2: ValueError: nothing left" in end.out, ended
        assert end.seconds - first.seconds < 30, ended


@pytest.mark.broad
def test_another_schedule_on_one_rank() -> None:
    """Refused before any message is sent."""
    check("other_schedule_in_a_pipeline", "ranks differ in the option schedule: this rank has 'gpipe', rank 0 has '1f1b'")
