"""A rank that changes weights or state by itself, or compiles or calls in another order, is told, and so are the others; what all ranks
change alike goes on without a word."""

from __future__ import annotations

import pytest

from tests.broad import broad
from tests.runtime.launch import Run, launch

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.timeout(300)]

TOLD = 3  # the exit code of a rank that was told while it ran
EVERYWHERE = "change it on every rank, without `if rank == 0`"


def go(way: str, mesh: str, ranks: int = 2) -> Run:
    ended = launch("tests.processes.parted:run", way, mesh, ranks=ranks, timeout_s=200)
    assert not ended.timed_out, ended
    return ended


@pytest.mark.parametrize(
    ("way", "mesh", "what", "where"),
    [
        ("loaded_on_rank_0", "dp=2", "and 8 more were", (0, 1)),
        ("multiplied_on_rank_1_in_a_loop", "tp=2", "up.weight was", (1, 0)),
        broad("loaded_on_rank_0", "dp_shard=2", "and 8 more were", (0, 1)),
        broad("loaded_on_rank_0", "tp=2", "and 8 more were", (0, 1)),
        broad("loaded_on_rank_0_in_a_loop", "dp=2", "and 8 more were", (0, 1)),
        broad("multiplied_on_rank_1", "dp=2", "up.weight was", (1, 0)),
        broad("state_changed_on_rank_0", "dp=2", "up.weight/exp_avg was", (0, 1)),
        broad("state_changed_on_rank_0_in_a_loop", "tp=2", "up.weight/exp_avg was", (0, 1)),
        broad("state_replaced_on_rank_0", "tp=2", "up.bias/exp_avg was", (0, 1)),
        broad("buffer_changed_on_rank_0", "tp=2", "norm.running_mean was", (0, 1)),
        broad("buffer_replaced_on_rank_0", "dp=2", "norm.running_mean was", (0, 1)),
        broad("copies_multiplied_on_rank_0", "tp=2", "qkv.weight was", (0, 1)),
        broad("multiplied_before_saving", "tp=2", "up.weight was", (0, 1)),
        broad("multiplied_before_a_checkpoint", "dp=2", "up.weight was", (0, 1)),
    ],
)
def test_a_change_on_one_rank(way: str, mesh: str, what: str, where: tuple[int, int]) -> None:
    """Both ranks end, with the parameter, the rank and what to do."""
    ended = go(way, mesh)
    for end in ended.ranks:
        assert end.code == TOLD and f"{what} changed on rank {where[0]} and not on rank {where[1]}" in end.out, ended
        assert "between two calls" in end.out and EVERYWHERE in end.out, ended


@pytest.mark.parametrize(
    ("way", "rank"), [("view_edited_on_rank_0", 0), broad("read_on_rank_1_in_a_loop", 1), broad("read_on_rank_1_while_others_compile", 1)]
)
def test_an_exchange_that_one_rank_makes_alone(way: str, rank: int) -> None:
    """Both ranks end, with the tensor and what to do, in place of waiting in torch."""
    ended = go(way, "tp=2")
    what = "a tensor of shape [] over tp" if "compile" in way else "a tensor of shape [8, 4] over tp"
    for end in ended.ranks:
        assert end.code == TOLD, ended
        assert f"rank {rank} exchanges parts of {what} with rank {1 - rank}, which does something else" in end.out, ended
        assert "make that call on every rank (take it out of `if rank == 0`)" in end.out, ended


@pytest.mark.broad
def test_an_exchange_with_ranks_that_have_ended() -> None:
    ended = go("read_on_rank_1_at_the_end", "tp=2")
    assert ended.ranks[0].code == 0 and ended.ranks[1].code == TOLD, ended
    assert "was still outside of a step, exchange a tensor of shape [8, 4] over tp" in ended.ranks[1].out, ended


@pytest.mark.parametrize(
    ("way", "mesh", "what"),
    [
        ("data_on_rank_0", "dp=2", "up.weight, up.bias, norm.weight, norm.bias and 2 more"),
        broad("another_state_on_each_rank", "tp=2", "norm.running_var, down.bias"),
    ],
)
def test_other_values_on_one_rank(way: str, mesh: str, what: str) -> None:
    """What torch does not count (`parameter.data`), and what all have changed, each to values of its own."""
    ended = go(way, mesh)
    for end in ended.ranks:
        assert end.code == TOLD and f"ranks 0 and 1 hold the same part of {what}, and have other values of it" in end.out, ended
        assert EVERYWHERE in end.out, ended


@pytest.mark.parametrize(
    ("way", "mesh"),
    [
        ("nothing_is_wrong", "dp=2"),
        broad("nothing_is_wrong", "tp=2"), broad("nothing_is_wrong", "dp_shard=2"), broad("nothing_is_wrong", "pp=2"),
        broad("copies_are_every_ranks", "tp=2"),
    ],
)  # fmt: skip
def test_what_all_ranks_change_alike(way: str, mesh: str) -> None:
    ended = go(way, mesh)
    assert ended.ok and all("no error" in end.out and "differ" not in end.err for end in ended.ranks), ended


@pytest.mark.broad
def test_a_step_of_an_optimizer_on_one_rank() -> None:
    ended = go("stepped_on_rank_0", "tp=2")
    for end in ended.ranks:
        assert end.code == TOLD and "steps between two calls are 3 on rank 0 and 1 on rank 1" in end.out, ended
        assert "call optimizer.step() on every rank, or on none" in end.out, ended


@pytest.mark.broad
def test_a_load_on_one_rank_that_ranks_must_make_together() -> None:
    ended = go("copies_loaded_on_rank_0", "tp=2")
    for end in ended.ranks:
        assert end.code == TOLD and "rank 0 brings what it sees of qkv.bias up to date, and rank 1 does not" in end.out, ended


def test_models_compiled_in_opposite_order() -> None:
    """Each rank's own values say which is which."""
    ended = go("models_in_opposite_order", "dp=2")
    for end in ended.ranks:
        assert end.code == TOLD and "what is model 2 on rank 0 was model 1 on rank 1, by its first values" in end.out, ended
        assert "compile models in the same order on every rank" in end.out, ended


@pytest.mark.parametrize("way", ["copies_in_opposite_order", broad("called_in_opposite_order"), broad("apart_in_opposite_order")])
def test_models_called_in_opposite_order(way: str) -> None:
    """Where values do not tell, since they are equal, or each rank's own, calls do."""
    ended = go(way, "dp=2")
    for end in ended.ranks:
        assert end.code == TOLD and "ranks 0 and 1 call programs in another order" in end.out, ended
        assert "compile models, and call them, in one order on every rank" in end.out, ended


@pytest.mark.broad
def test_steps_of_one_model_compiled_in_opposite_order() -> None:
    ended = go("steps_in_opposite_order", "dp=2")
    for end in ended.ranks:
        assert end.code == TOLD and "ranks differ in the compiled program" in end.out, ended
