"""A ring in zigzag order means what attention means on one device, and is taken where it balances what a causal mask leaves to do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from meshc import artifact
from meshc.cost.devices import assume_device, device
from meshc.cost.roofline import seconds
from meshc.ir import op_name
from meshc.program.program import PlainProgram
from meshc.report import summary
from tests.broad import broad
from tests.meaning.test_rings import LAYERS, RING, SEQ, Attends, captured, kinds, step, trained
from tests.zoo.run import adamw

CASES = [
    ("nanogpt", "cp=2", RING),
    broad("llama", "cp=3", RING),
    broad("llama", "cp=2", RING),
    broad("llama", "cp=4", RING),
    broad("llama", "cp=8", RING),
    broad("nanogpt", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("llama", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    broad("gpt_oss", "cp=4", RING),
    broad("gemma3", "cp=3", RING),
    broad("llama", "cp=2,hp=2", "cp: seq\nhp: heads@attention > seq"),
]


@pytest.mark.parametrize("kind, mesh, plan", CASES)
def test_a_training_step_is_the_models_own(kind: str, mesh: str, plan: str) -> None:
    """Loss, every gradient, and parameters after two steps. Of 39 positions three ranks have 13, halves of 7 and of 6, in that order from
    one end of the model to the other; other numbers of ranks have padded tiles, which are exchanged at each attention."""
    source = captured(kind)
    source.verify_training(mesh, plan, adamw, attention="zigzag")
    assert ("to_zigzag" in kinds(source.latest)) == (kind != "gemma3"), "all of gemma3's masks here have a window"


@pytest.mark.broad
def test_pipeline_stages_too() -> None:
    source = captured("llama", 2)
    source.verify_training("pp=2,cp=2", RING, adamw, attention="zigzag", microbatches=2)
    assert "to_zigzag" in kinds(source.latest)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(ranks: int) -> None:
    """What a ring moves, and halves of a tile: forward q, k, v, the output and a number for each query; backward the output, its
    gradient and three gradients, and of 39 positions, which pad tiles, q and the numbers once more. Gradients come home by a shift more."""
    program = step("nanogpt", f"cp={ranks}", RING, attention="zigzag")
    layers, rows, heads, head, tile = LAYERS, 4, 4, 8, -(-SEQ // ranks)
    values, numbers = rows * heads * head * 8, rows * heads * 8
    for phase, shifted, exchanged in (("forward", 2, 4), ("backward", 4, 6)):
        found = [use for use in summary.collectives(program) if use.phase == phase]
        moved: Counter[str] = Counter()
        for use in found:
            moved[use.kind] += use.bytes_per_rank * use.times
        assert moved["ring_shift"] == layers * (ranks - 1) * shifted * tile * values
        assert moved["to_zigzag"] + moved["from_zigzag"] == layers * (tile // 2) * (exchanged * values + numbers)
    assert "all_gather" not in kinds(program)


def test_keys_that_heads_share_are_exchanged_and_travel_once_for_all_of_them() -> None:
    program = step("llama", "cp=4", RING, attention="zigzag")
    rows, heads, kv_heads, head, tile = 4, 4, 2, 8, 10
    sizes = [use.bytes_per_rank for use in summary.collectives(program) if use.kind == "ring_shift"]
    assert set(sizes) == {rows * kv_heads * tile * head * 8}
    halves = {use.bytes_per_rank for use in summary.collectives(program) if use.kind in ("to_zigzag", "from_zigzag")}
    assert halves == {rows * count * (tile // 2) * 8 for count in (heads * head, kv_heads * head, heads)}


def test_masks_that_leave_all_ranks_as_much_to_do_stay_in_order() -> None:
    for causal, wanted in ((False, {"ring_shift"}), (True, {"ring_shift", "to_zigzag"})):
        program = trained(Attends(is_causal=causal), "cp=2", {"x": torch.randn(2, 8, 16)}, "zigzag")
        assert kinds(program.compiled) & {"ring_shift", "to_zigzag"} == wanted


def blocks(program: PlainProgram) -> dict[str, float]:
    """Seconds of the operators over blocks, by their name, in all."""
    on, found = device("h100"), dict[str, float]()
    for node in program.stages["main"].graph.nodes:
        if node.op == "call_function" and any(word in str(node.target) for word in ("meshc.attention",)):
            found[op_name(node)] = found.get(op_name(node), 0.0) + seconds(node, on)
    return found


def test_the_clock_halves_the_work_of_long_sequences_and_takes_the_order_where_that_is_faster() -> None:
    """Attention of 32,768 positions over 8 ranks: exchanges take little of what is won. Without a mask there is nothing to win, and of 60
    positions, whose tiles are padded, work is less than messages."""

    class Wide(Attends):
        def __init__(self, **how: Any) -> None:
            super().__init__(1024, 8, **how)

    def compiled(attention: str | None, length: int = 32768, **how: Any) -> PlainProgram:
        return trained(Wide(**how).bfloat16(), "cp=8", {"x": torch.empty(1, length, 1024).bfloat16()}, attention).compiled

    with assume_device(device("h100")):
        found = compiled(None, is_causal=True)
        assert kinds(found) >= {"ring_shift", "to_zigzag"}
        assert "to_zigzag" not in kinds(compiled("ring", 60, is_causal=True)) and "to_zigzag" not in kinds(compiled("ring"))
        balanced, plain = blocks(found), blocks(compiled("zigzag"))
    assert balanced["meshc.attention_zigzag"] == pytest.approx(plain["meshc.attention"] / 2, rel=0.1)
    assert balanced["meshc.attention_zigzag_backward"] == pytest.approx(plain["meshc.attention_backward"] / 2, rel=0.1)


def test_a_saved_program_is_read_and_checked(tmp_path: Any) -> None:
    program = trained(Attends(is_causal=True), "cp=2", {"x": torch.randn(1, 7, 16)}, "zigzag")
    program.save(tmp_path / "zigzag.meshc")
    assert "to_zigzag" in kinds(artifact.load(tmp_path / "zigzag.meshc"))
