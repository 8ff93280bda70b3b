"""How long values of compiled regions stay: text in, numbers out."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.cost import peak_memory
from meshc.cost.region_lifetimes import bucket_piece_readers, fused_recomputes, reusable_operands
from meshc.ir import calls
from meshc.ir.mesh import Mesh
from meshc.ir.nodes import update
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from meshc.text.parse import parse_stage

MB = 4_000_000

HEAD = """def main(
    x: "f32[1000, 1000]" = "input:x",
    w: "f32[1000, 1000]" = "parameter:w",
):
"""
GATHERED = """    g: "f32[2000, 1000]" = all_gather(w, ["dp"], 0)
"""
PIECES = """    apart: "f32[2, 1000000]" = aten.reshape(g, [2, 1000000])
    slice_1: "f32[2, 500000]" = aten.slice.Tensor(apart, 1, 0, 500000)
    first: "f32[1000, 1000]" = aten.reshape(slice_1, [1000, 1000])
    slice_2: "f32[2, 500000]" = aten.slice.Tensor(apart, 1, 500000, 1000000)
    second: "f32[1000, 1000]" = aten.reshape(slice_2, [1000, 1000])
    y: "f32[1000, 1000]" = aten.mm(x, first)
    z: "f32[1000, 1000]" = aten.mm(y, second)
    z_1: "f32[1000, 1000]" = aten.mm(z, x)
"""
PRODUCT = """    p: "f32[1000, 1000]" = aten.mm(x, w)
    a: "f32[1000, 1000]" = aten.silu(p)
    grown: "f32[1000, 1000]" = aten.mm(x, a)
    h: "f32[1000, 1000]" = aten.mm(x, p)
    z: "f32[1000, 1000]" = aten.mul.Tensor(p, h)
    late: "f32[1000, 1000]" = aten.mul.Tensor(p, grown)
    z_1: "f32[1000, 1000]" = aten.mm(grown, z)
    z_2: "f32[1000, 1000]" = aten.mm(late, z_1)
"""


def stage_of(outside: str, lines: str, result: str, compiled: bool) -> Stage:
    body = "".join(f"    {line}\n" for line in lines.splitlines()) if compiled else lines
    region = "    with region(0):\n" if compiled else ""
    return parse_stage(f'{HEAD}{outside}{region}{body}    return {{\n        "output:{result}": {result},\n    }}\n')


def peak(stage: Stage, result: str) -> int:
    ports = (Port("input", "x", (1000, 1000), torch.float32), Port("parameter", "w", (1000, 1000), torch.float32))
    results = (Port("output", result, (1000, 1000), torch.float32),)
    once = (Instruction("run", "main"),)
    return peak_memory.peak(PlainProgram({"main": stage}, Mesh("dp=2"), Plan(""), ports, results, once, axis_sizes={"dp": 2})).total


def by_name(stage: Stage) -> dict[str, Node]:
    return {node.name: node for node in calls(stage.graph)}


def test_a_bucket_stays_until_its_last_piece_has_been_read() -> None:
    """Line by line its two pieces are copied at once, and it is gone when the first product is made."""
    plain, region = (stage_of(GATHERED, PIECES, "z_1", compiled) for compiled in (False, True))
    assert bucket_piece_readers(list(plain.graph.nodes)) == {}
    named = by_name(region)
    assert bucket_piece_readers(list(region.graph.nodes)) == {named["first"]: named["y"], named["second"]: named["z"]}
    assert peak(plain, "z_1") == 4 * MB  # the bucket is two; and both pieces
    assert peak(region, "z_1") == 5 * MB  # and what the first product makes


def lasts(region: Stage, *names: str) -> list[str]:
    """Of each value the line at which it goes."""
    walk = peak_memory.StageLiveness(region)
    return [walk.nodes[walk.last[by_name(region)[name]]].name for name in names]


def test_what_is_recomputed_is_there_with_what_else_is_made_of_its_operand() -> None:
    """`z` is made where `a` is, if nothing that it reads waits for `a`; `late` reads a product of `a`."""
    region = stage_of("", PRODUCT, "z_2", compiled=True)
    named, nodes = by_name(region), list(region.graph.nodes)
    assert fused_recomputes(nodes) == {} and lasts(region, "a", "h", "p") == ["grown", "z", "late"]
    before = peak(region, "z_2")
    update(named["a"], again=True)
    assert fused_recomputes(nodes) == {named["a"]: named["z"]}
    assert list(reusable_operands(named["a"], named["z"])) == [named["h"]]  # a is made of p too
    assert lasts(region, "a", "h", "p") == ["z", "h", "late"]  # z lies where h lay
    assert before == 4 * MB and peak(region, "z_2") == 4 * MB  # p, grown, h, z; then p, grown, a, and h or z


def test_what_is_read_once_more_is_not_written_over() -> None:
    region = stage_of("", PRODUCT.replace("aten.mm(grown, z)", "aten.mm(h, z)"), "z_2", compiled=True)
    update(by_name(region)["a"], again=True)
    assert lasts(region, "a", "h") == ["z", "z_1"]
    assert peak(region, "z_2") == 5 * MB  # p, grown, a, h, z
