"""What compiled regions keep in memory and move: text in, numbers out."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
import torch

from meshc.cost import peak_memory
from meshc.cost.fused_values import is_fused
from meshc.cost.roofline import moved_bytes
from meshc.cost.stage_clock import stage_seconds
from meshc.ir import calls
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from meshc.text.parse import parse_stage
from tests.cost.building import ROUND

EAGER = """def main(
    x: "f32[1000, 1000]" = "input:x",
    w: "f32[1000]" = "input:w",
):
    mul: "f32[1000, 1000]" = aten.mul.Tensor(x, w)
    turned: "f32[1000, 1000]" = aten.t(mul)
    tanh: "f32[1000, 1000]" = aten.tanh(turned)
    mm: "f32[1000, 1000]" = aten.mm(tanh, x)
    exp: "f32[1000, 1000]" = aten.exp(mm)
    both: "f32[1000, 1000]" = aten.mul.Tensor(exp, mm)
    total: "f32[]" = aten.sum(both)
    return {
        "output:total": total,
    }
"""
MB = 4_000_000

head, lines, tail = EAGER.partition("):\n")[0] + "):\n", EAGER.partition("):\n")[2].partition("    return")[0], "    return" + EAGER.partition("    return")[2]
REGION = head + "    with region(0):\n" + "".join(f"    {line}\n" for line in lines.splitlines()) + tail


def fused(stage: Stage) -> list[str]:
    return [node.name for node in calls(stage.graph) if is_fused(node)]


def peak(stage: Stage, backend: str) -> peak_memory.Peak:
    ports = (Port("input", "x", (1000, 1000), torch.float32), Port("input", "w", (1000,), torch.float32))
    results = (Port("output", "total", (), torch.float32),)
    program = PlainProgram(
        {"main": stage}, Mesh("dp=1"), Plan(""), ports, results, (Instruction("run", "main"),), axis_sizes={"dp": 1}, backend=backend
    )
    return peak_memory.peak(program)


def test_what_is_made_for_one_line_of_generated_code_is_in_no_memory() -> None:
    assert fused(parse_stage(EAGER)) == []
    assert fused(parse_stage(REGION)) == ["mul", "exp", "both"]  # tanh is read by a product, mm made by one, total leaves


def test_the_peak_is_of_what_libraries_read_and_make() -> None:
    assert peak(parse_stage(EAGER), "eager").total == 3 * MB  # mm, exp, both
    assert peak(parse_stage(REGION), "inductor").total == 2 * MB  # tanh and mm


def test_what_a_region_does_not_keep_is_neither_moved_nor_launched() -> None:
    stage = parse_stage(REGION)
    moved = {node.name: moved_bytes(node) for node in calls(stage.graph)}
    small = 4000
    # exp and both each read mm: what two lines read counts for both
    assert moved == {"mul": MB + small, "turned": moved["turned"], "tanh": MB, "mm": 3 * MB, "exp": MB, "both": MB, "total": 4}
    seconds = stage_seconds(stage.graph, Mesh("dp=1"), ROUND).compute
    assert seconds == pytest.approx((MB + small + MB + MB + MB + 4) / 1e9 + 3 * MB / 1e9 + 3e-6)  # tanh, mm, total are launched
    alone = stage_seconds(parse_stage(EAGER).graph, Mesh("dp=1"), ROUND).compute
    assert alone == pytest.approx((2 * MB + small + 2 * MB + 3 * MB + 2 * MB + 3 * MB + MB + 4) / 1e9 + 6e-6)


def test_a_value_that_leaves_its_region_or_has_two_readers_is_kept() -> None:
    assert "mul" not in fused(parse_stage(REGION.replace('"output:total": total', '"output:total": mul')))
    assert "mul" not in fused(parse_stage(REGION.replace("aten.mul.Tensor(exp, mm)", "aten.mul.Tensor(exp, mul)")))
    assert "both" not in fused(parse_stage(REGION.replace("        total:", "    total:")))
