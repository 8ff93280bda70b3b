"""The public calls on real ranks. Each test is one launch that makes many checks, since starting ranks is what takes the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshc.ir.mesh import Mesh
from tests.broad import broad
from tests.processes.equality import SAMPLES
from tests.runtime.launch import launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def run(module: str, ranks: int, *arguments: str) -> str:
    """What rank 0 printed."""
    ended = launch(f"tests.processes.{module}:run", *arguments, ranks=ranks, timeout_s=840)
    assert ended.ok, ended
    return ended.ranks[0].out


@pytest.mark.parametrize(
    "which, ranks",
    [
        ("two", 2), ("four", 4), ("inductor", 2),
        broad("more of two", 2), broad("more of four", 4), broad("more of inductor", 2), broad("nodes", 4),
    ],
)  # fmt: skip
def test_training_equals_plain_pytorch(which: str, ranks: int) -> None:
    assert len(run("equality", ranks, which).splitlines()) == len(SAMPLES[which])


@pytest.mark.broad
def test_state_in_fewer_bits_is_saved_and_loaded() -> None:
    assert run("kept", 2).split() == ["float64", "masters", "8bit", "forms"]


@pytest.mark.broad
def test_heads_in_chunks() -> None:
    assert run("chunked", 2, "dp=2", "never_whole", "budgeted").split() == ["never_whole", "budgeted"]


def test_module_mode_on_two_ranks() -> None:
    names = ("refusals", "gradients_of_inputs", "outputs_as_they_lie", "several_calls_and_backwards", "some_outputs", "three_steps")
    assert run("module_mode", 2, "dp=2", *names).split() == [*names]


def test_unusual_turns_of_module_mode() -> None:
    names = ("parts_of_a_forward", "hooks_around_it", "written_outputs", "written_before_backward")
    assert run("module_edges", 2, "tp=2", *names).split() == [*names]


@pytest.mark.broad
def test_more_unusual_turns_of_module_mode() -> None:
    names = ("anomalies", "models_that_share", "model_of_a_step")
    assert run("module_edges", 2, "tp=2", *names).split() == [*names]


@pytest.mark.parametrize(
    "mesh, names",
    [
        ("tp=2", ("decoder_and_head",)), broad("tp=2", ("many_layers", "of_a_step", "encoder", "embeddings")),
        broad("dp=2", ("local_parts",)), broad("pp=2", ("over_stages",)),
    ],
)  # fmt: skip
def test_modules_that_are_called_by_hand(mesh: str, names: tuple[str, ...]) -> None:
    assert run("by_hand", 2, mesh, *names).split() == [*names]


@pytest.mark.broad
def test_more_of_module_mode_on_two_ranks() -> None:
    names = ("several_sets", "no_output", "two_programs")
    assert run("module_mode", 2, "dp=2", *names).split() == [*names]


def test_parameters_that_are_written_set_tied_or_moved_after_compiling() -> None:
    names = ("written", "data_set", "tied", "untied", "removed", "data_set_before_saving", "tied_in_a_step", "swapped_uneven")
    assert run("rearranged", 2, "dp_shard=2", *names).split() == [*names]


@pytest.mark.broad
def test_module_mode_split_over_heads() -> None:
    names = ("caches", "several_sets", "some_outputs", "three_steps")
    assert run("module_mode", 2, "tp=2", *names).split() == [*names]


@pytest.mark.parametrize(
    "mesh, ranks, names",
    [
        ("tp=2", 2, ("adafactor", "untraceable")), broad("tp=2", 2, ("around_a_step", "adafactor_elsewhere", "others", "derived")),
        broad("dp_shard=2,tp=2", 4, ("adafactor", "adafactor_elsewhere", "others")),
    ],
)  # fmt: skip
def test_optimizers_that_cannot_take_dtensors(mesh: str, ranks: int, names: tuple[str, ...]) -> None:
    assert run("own_steps", ranks, mesh, *names).split() == [*names]


@pytest.mark.parametrize(
    "mesh, ranks, names",
    [
        ("tp=2", 2, ("seeded_alike", "seeded_apart")), broad("tp=2", 2, ("of_other_kinds", "in_a_step")), broad("pp=2", 2, ("in_a_step",)),
        broad("dp_shard=2,tp=2", 4, ("seeded_alike", "seeded_apart", "of_other_kinds", "in_a_step")), broad("dp=2,pp=2", 4, ("in_a_step",)),
    ],
)  # fmt: skip
def test_random_values_drawn_into_parameters(mesh: str, ranks: int, names: tuple[str, ...]) -> None:
    assert run("drawn", ranks, mesh, *names).split() == [*names]


@pytest.mark.parametrize(
    "mesh, ranks, names",
    [
        ("tp=2", 2, ("edited", "averages_before", "looked_at", "numbers", "saved_by_each", "saved_whole", "saved_by_rank_0")),
        ("dp=2", 2, ("numbers_of_wholes", "saved_by_any")), broad("pp=2", 2, ("edited_beside_a_step",)),
        broad("dp=2", 2, ("edited", "averages_before")),
        broad("dp_shard=2,tp=2", 4, ("edited", "averages_before", "looked_at", "numbers", "edited_beside_a_step")),
        broad("dp_shard=2,tp=2", 4, ("saved_by_each", "saved_whole")),
    ],
)  # fmt: skip
def test_edits_through_views_and_what_is_saved(mesh: str, ranks: int, names: tuple[str, ...]) -> None:
    """A check in which a rank refuses alone is the last of its launch."""
    assert [line for line in run("edits", ranks, mesh, *names).split("\n") if line in names] == [*names]


@pytest.mark.parametrize("mesh, ranks", [broad("dp_shard=2", 2), ("tp=2", 2), broad("dp_shard=2,tp=2", 4)])
def test_verify_under_a_process_group(mesh: str, ranks: int) -> None:
    names = ("train_step", "module", "wrong_program")
    assert run("verify", ranks, mesh, *names).split() == [*names]


def test_train_step() -> None:
    names = ("scheduled", "recompiled", "another_batch", "microbatches", "full_disk", "partial_storage")
    assert run("train_step", 2, "dp=2", *names).split() == [*names]


@pytest.mark.broad
def test_more_of_train_step() -> None:
    names = ("weight_decay_to_zero", "loss_arguments", "mean_of_parts", "autocast", "dynamic_sizes")
    assert run("train_step", 2, "dp=2", *names).split() == [*names]


@pytest.mark.broad
def test_fewer_heads_of_keys_than_ranks() -> None:
    names = ("steps", "generates")
    assert run("shared_heads", 4, "tp=4", *names).split() == [*names]


def test_who_asks_for_a_state_dict() -> None:
    names = ("warned_once", "save_pretrained")
    assert run("savers", 2, "tp=2", *names).split() == [*names]


@pytest.mark.parametrize("names", [("kept", "added", "behind", "two_steps"), broad(("hooked", "counted"))], ids=" ".join)
def test_loops(names: tuple[str, ...]) -> None:
    assert run("loops", 2, "dp=2", *names).split() == [*names]


@pytest.mark.parametrize("names", [("resumed",), broad(("divided", "trained", "saved"))], ids=" ".join)
def test_several_optimizers(names: tuple[str, ...]) -> None:
    assert run("optimizers", 2, "dp=2", *names).split() == [*names]


@pytest.mark.parametrize("names", [("local_microbatches", "saved"), broad(("whole", "local", "stages"))], ids=" ".join)
def test_metrics(names: tuple[str, ...]) -> None:
    assert [line for line in run("metrics", 2, "dp=2", *names).split("\n") if line in names] == [*names]


@pytest.mark.parametrize("names", [("trained", "strict"), broad(("module", "dropped", "bounded"))], ids=lambda names: names[-1])
def test_experts(names: tuple[str, ...]) -> None:
    """A check in which a step is refused is the last of its launch."""
    assert run("experts", 2, "ep=2", *names).split() == [*names]


@pytest.mark.parametrize(
    "mesh, ranks, names",
    [
        broad("ep=2", 2, ("moved", "refused")), broad("ep=2", 2, ("copied",)),
        broad("ep=2", 2, ("measured", "saved", "autograd")), broad("ep=2", 2, ("other_state", "unequal", "biased", "from_meta")),
        *(broad(mesh, 4, ("elsewhere",)) for mesh in ("ep=4", "dp=2,ep=2", "dp_shard=2,ep=2", "ep=2,tp=2", "pp=2,ep=2")),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)  # fmt: skip
def test_experts_that_move(mesh: str, ranks: int, names: tuple[str, ...]) -> None:
    assert [line for line in run("rebalance", ranks, mesh, *names).split("\n") if line in names] == [*names]


@pytest.mark.parametrize(
    "names",
    [
        ("unequal_labels", "dynamic_sizes", "counts_of_a_trainer", "same_rows", "local_mean", "local_loss_unsaid"),
        ("sequence_first", "mask_without_rows", "uneven_columns"),
        broad(("batch_norm", "microbatches")),
    ],
    ids=lambda names: names[-1],
)
def test_local_inputs(names: tuple[str, ...]) -> None:
    assert run("local_inputs", 2, "dp=2", *names).split() == [*names]


@pytest.mark.parametrize(
    "names",
    [
        ("shapes", "out_of_range", "converted", "compilations", "empty", "one_of_all"), ("alone",), ("first_call",),
        broad(("values", "features")),
    ],
    ids=lambda names: names[-1],
)  # fmt: skip
def test_refusals_that_are_caught(names: tuple[str, ...]) -> None:
    """A check in which one rank refuses alone is the last of its launch."""
    assert run("refusals", 2, "dp=2", *names).split() == [*names]


def test_pipeline_stages_on_two_ranks() -> None:
    names = ("scheduled", "two_programs", "saved_by_ranks", "a_part_and_then_the_whole")
    assert run("pipeline", 2, "pp=2", *names).split() == [*names]


@pytest.mark.broad
def test_more_of_pipeline_stages_on_two_ranks() -> None:
    names = ("states_of_another_cut", "from_meta", "verified", "as_they_lie")
    names = (*names, "two_programs_the_other_way", "dynamic_sizes", "mean_of_parts", "inductor")
    assert run("pipeline", 2, "pp=2", *names).split() == [*names]


@pytest.mark.broad
def test_pipeline_stages_beside_another_axis() -> None:
    names = ("local_inputs", "scheduled", "as_they_lie")
    assert run("pipeline", 4, "pp=2,dp=2", *names).split() == [*names]


@pytest.mark.parametrize(
    "names",
    [("uneven_steps", "uneven_module", "unlike_parts", "another_shape"), broad(("short_batches", "an_epoch"))],
    ids=lambda names: names[-1],
)
def test_a_local_batch_of_another_shape(names: tuple[str, ...]) -> None:
    assert run("local_inputs", 2, "dp=2", *names).split() == [*names]


@pytest.mark.broad
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=2,dp=2"])
def test_uneven_parts_beside_another_axis(mesh: str) -> None:
    names = ("short_batches", "many_lengths", "uneven_steps", "uneven_lengths", "uneven_module", "unlike_parts")
    assert run("local_inputs", 4, mesh, *names).split() == [*names]


STATE_APART = """
store transformer.wte.weight state: vocab/dp/tp, _
store *.c_attn.weight state: hidden/dp, _
store *.ln_?.weight: hidden/tp/dp
"""
PARAMETERS_APART = """
dp: batch; store state
store transformer.wte.weight params: vocab/dp/dp_shard, hidden!
store *.c_attn.weight state: hidden/dp_shard/dp, _
"""


@pytest.mark.parametrize(
    "cases, route",
    [
        broad(("draws",), (("dp=2,tp=2", None), ("dp=4,tp=1", None), ("dp=1", None))),
        (("gpt2",), (("tp=2", None), ("pp=2", None))),
        broad(("draws", "gpt2"), (("tp=2", None), ("dp=2", "fsdp"), ("pp=2", None))),
        broad(("gpt2",), (("dp=2,tp=2", None), ("dp=4,tp=1", None), ("dp=1", None))),
        broad(("gpt2",), (("dp=2,tp=2", STATE_APART), ("dp=2,dp_shard=2", PARAMETERS_APART), ("dp=1", None))),
        broad(("draws", "gpt2"), (("pp=2,dp=2", None), ("dp=1", None), ("pp=2", None))),
    ],
    ids=lambda words: " to ".join(mesh for mesh, _ in words) if isinstance(words[0], tuple) else " ".join(words),
)
def test_resume_under_another_mesh(cases: tuple[str, ...], route: tuple[tuple[str, str | None], ...], tmp_path: Path) -> None:
    """GPT-2, whose fused c_attn lies by heads under tp, with dropout, and a model that draws in every way that there is: the losses
    are those of training that never stopped."""
    for step, (mesh, plan) in enumerate(route):
        do = "load" if step else "save"
        run("resume", Mesh(mesh).world_size, mesh, plan or "", str(tmp_path), do, *cases)
