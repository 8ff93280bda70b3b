"""The public calls on real ranks. Each case is one launch that makes many checks, since starting ranks is what takes the time."""

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


IN_SIGNS = "compress dp: sign of 4 parts"
IN_INTEGERS = "compress dp: int8"
DELAYED = "precision *: float8 tensor, delayed\nprecision 4: float8 tensor, delayed"
MASKS = "sparse *: 2:4, every 15\nsparse 4: 2:4, every 15"


@pytest.mark.parametrize(
    "route",
    [
        (("dp=2", f"dp: batch\n{IN_INTEGERS}"), ("dp=2,tp=2", f"dp: batch; store state\ntp: ffn\n{IN_INTEGERS}")),
        broad((
            ("dp=2", f"dp: batch\n{IN_SIGNS}"), ("dp=1,tp=2", f"dp: batch\ntp: ffn\n{IN_SIGNS}"),
            ("dp=4", f"dp: batch; store params, grads, state\n{IN_SIGNS}"),
        )),
        (("dp=2", f"dp: batch\n{DELAYED}"), ("dp=2,tp=2", f"dp: batch; store params, grads, state\ntp: ffn\n{DELAYED}")),
        broad((("dp=2", f"dp: batch; store params, grads, state\n{MASKS}"), ("dp=1,tp=2", f"dp: batch\ntp: ffn\n{MASKS}"))),
    ],
    ids=lambda route: " to ".join(mesh for mesh, _ in route) + f", {route[0][1].split()[2]}",
)  # fmt: skip
def test_what_lines_keep_resumes_under_another_mesh(route: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    """20 steps, saved, and 20 steps more under another mesh and plan are 40 steps."""
    for step, (mesh, plan) in enumerate(route):
        run("compressed", Mesh(mesh).world_size, mesh, plan, str(tmp_path), "load" if step else "save")
    mesh, plan = route[0]
    if "compress" not in plan:
        return
    run("compressed", Mesh(mesh).world_size, mesh, plan.partition(" of ")[0] + " of 6 parts", str(tmp_path), "parts")


@pytest.mark.parametrize("route", [("dp_shard=2", "tp=2"), broad(("pp=2", "dp=2", "dp_shard=2,tp=2"))], ids=" to ".join)
def test_scale_and_skipped_steps_resume_under_another_mesh(route: tuple[str, ...], tmp_path: Path) -> None:
    for step, mesh in enumerate(route):
        ended = launch("tests.processes.scaled:resume", mesh, str(tmp_path), "load" if step else "save", ranks=Mesh(mesh).world_size)
        assert ended.ok, ended


HEARD = "heard seen read_beside_images told_by_a_model_inside"
LAUNCHES = [
    ("module_mode", "dp=2", "refusals gradients_of_inputs outputs_as_they_lie several_calls_and_backwards some_outputs three_steps"),
    ("module_edges", "tp=2", "parts_of_a_forward hooks_around_it written_outputs written_before_backward"),
    ("by_hand", "tp=2", "decoder_and_head"),
    ("rearranged", "dp_shard=2", "written data_set tied untied removed data_set_before_saving tied_in_a_step swapped_uneven"),
    ("own_steps", "tp=2", "adafactor untraceable"),
    ("drawn", "tp=2", "seeded_alike seeded_apart"),
    ("edits", "tp=2", "edited edited_lists averages_before looked_at numbers saved_by_each saved_whole saved_by_rank_0"),
    ("edits", "dp=2", "numbers_of_wholes saved_as_plain"),
    ("verify", "tp=2", "train_step module wrong_program"),
    ("train_step", "dp=2", "scheduled recompiled another_batch microbatches full_disk partial_storage"),
    ("mixed", "dp_shard=2", "equals_fsdp sends_fewer_bytes"),
    ("scaled", "dp_shard=2", "decided own_loop"),
    ("scaled", "pp=2", "decided"),
    ("savers", "tp=2", "warned_once save_pretrained"),
    ("loops", "dp=2", "kept added behind two_steps"),
    ("optimizers", "dp=2", "resumed"),
    ("metrics", "dp=2", "local_microbatches saved"),
    ("experts", "ep=2", "trained strict"),
    ("local_inputs", "dp=2", "unequal_labels dynamic_sizes counts_of_a_trainer same_rows local_mean local_loss_unsaid"),
    ("local_inputs", "dp=2", "sequence_first mask_without_rows uneven_columns"),
    ("local_inputs", "dp=2", "uneven_steps uneven_module unlike_parts another_shape"),
    ("refusals", "dp=2", "shapes out_of_range converted compilations empty one_of_all"),
    ("refusals", "dp=2", "alone"),
    ("refusals", "dp=2", "first_call"),
    ("pipeline", "pp=2", "scheduled two_programs saved_by_ranks a_part_and_then_the_whole"),
    ("generation", "tp=2", "short refusals"),
    ("generation", "dp=2", "own_draws"),
    ("first_values", "dp_shard=2", "stock bytes_held"),
]  # fmt: skip
BROAD = [
    ("chunked", "dp=2", "never_whole budgeted"),
    ("module_edges", "tp=2", "anomalies models_that_share model_of_a_step"),
    ("by_hand", "tp=2", "many_layers of_a_step encoder embeddings"),
    ("by_hand", "dp=2", "local_parts"),
    ("by_hand", "pp=2", "over_stages"),
    ("module_mode", "dp=2", "several_sets no_output two_programs"),
    ("module_mode", "tp=2", "caches several_sets some_outputs three_steps"),
    ("own_steps", "tp=2", "around_a_step adafactor_elsewhere others derived"),
    ("own_steps", "dp_shard=2,tp=2", "adafactor adafactor_elsewhere others"),
    ("drawn", "tp=2", "of_other_kinds in_a_step"),
    ("drawn", "pp=2", "in_a_step"),
    ("drawn", "dp_shard=2,tp=2", "seeded_alike seeded_apart of_other_kinds in_a_step"),
    ("drawn", "dp=2,pp=2", "in_a_step"),
    ("edits", "pp=2", "edited_beside_a_step"),
    ("edits", "dp=2", "edited averages_before"),
    ("edits", "dp_shard=2,tp=2", "edited averages_before looked_at numbers edited_beside_a_step"),
    ("edits", "dp_shard=2,tp=2", "saved_by_each saved_whole"),
    ("verify", "dp_shard=2", "train_step module wrong_program"),
    ("verify", "dp_shard=2,tp=2", "train_step module wrong_program"),
    ("train_step", "dp=2", "weight_decay_to_zero loss_arguments mean_of_parts autocast dynamic_sizes"),
    ("scaled", "dp=2", "decided own_loop autocast accumulated a_scale_of_one_rank"),
    ("scaled", "tp=2", "decided own_loop autocast"),
    ("scaled", "dp_shard=2,tp=2", "decided own_loop autocast accumulated"),
    ("shared_heads", "tp=4", "steps generates"),
    ("loops", "dp=2", "hooked counted"),
    ("optimizers", "dp=2", "divided trained saved"),
    ("metrics", "dp=2", "whole local stages"),
    ("experts", "ep=2", "module dropped bounded"),
    ("rebalance", "ep=2", "moved refused"),
    ("rebalance", "ep=2", "copied"),
    ("rebalance", "ep=2", "measured saved autograd"),
    ("rebalance", "ep=2", "other_state unequal biased from_meta"),
    *(("rebalance", mesh, "elsewhere") for mesh in ("ep=4", "dp=2,ep=2", "dp_shard=2,ep=2", "ep=2,tp=2", "pp=2,ep=2")),
    ("local_inputs", "dp=2", "batch_norm microbatches"),
    ("local_inputs", "dp=2", "short_batches an_epoch"),
    *(
        ("local_inputs", mesh, "short_batches many_lengths uneven_steps uneven_lengths uneven_module unlike_parts")
        for mesh in ("dp=2,tp=2", "tp=2,dp=2")
    ),
    ("refusals", "dp=2", "values features"),
    (
        "pipeline", "pp=2",
        "states_of_another_cut from_meta verified as_they_lie two_programs_the_other_way dynamic_sizes mean_of_parts inductor",
    ),
    ("pipeline", "pp=2,dp=2", "local_inputs scheduled as_they_lie"),
    ("generation", "tp=2", "greedy"),
    ("generation", "tp=2", "seeds"),
    ("generation", "tp=2", "rows copies sampled beams_and_chunks windows_and_static turns looked_at pipelines"),
    ("generation", "tp=2", "windows windows_held"),
    ("generation", "tp=2", "encoders lengths lengths_followed"),
    ("generation", "tp=2", "states states_held"),
    ("generation", "dp=2", "encoders greedy rows beams_and_chunks turns looked_at"),
    ("generation", "pp=2", "greedy rows sampled"),
    ("generation", "cp=2", "greedy rows windows_and_static"),
    ("generation", "dp=2", "windows windows_held"),
    ("generation", "cp=2", "windows windows_held"),
    ("generation", "dp=2,tp=2", "greedy sampled"),
    ("generation", "dp=2,tp=2", "states states_held"),
    ("generation", "pp=2,tp=2", "greedy"),
    *(("heard", mesh, HEARD) for mesh in ("tp=2", "dp=2", "dp=2,tp=2")),
    ("first_values", "dp_shard=2", "halves"),
    ("first_values", "tp=2", "stock halves"),
    ("first_values", "pp=2", "stock"),
    ("first_values", "dp=2", "stock"),
    ("first_values", "dp=2,tp=2", "stock halves"),
    ("first_values", "pp=2,tp=2", "stock"),
]  # fmt: skip
"""Module of this folder, mesh, its checks in order. A check in which a rank refuses alone is the last of its launch."""
PRINTS_MORE = {"edits", "metrics", "rebalance"}


@pytest.mark.parametrize("module, mesh, names", [*LAUNCHES, *(broad(*one) for one in BROAD)])
def test_ranks_make_all_checks(module: str, mesh: str, names: str) -> None:
    done = run(module, Mesh(mesh).world_size, mesh, *names.split()).split()
    assert [name for name in done if name in names.split() or module not in PRINTS_MORE] == names.split()


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
