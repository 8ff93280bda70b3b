"""What is in memory for collectives on their way: text in, bytes out."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.fx import Node

from meshc.cost import peak_memory
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program import in_flight
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from meshc.runtime.comm import collectives
from meshc.runtime.run import codegen
from meshc.text.parse import parse_stage

MIB = 1024 * 1024

# Three gradients of 4 MiB: 12 MiB in all, so no more than one of them is on its way at a time.
SCATTERS = """def main(x: "f32[1024, 1024]" = "input:x"):
    g1: "f32[1024, 1024]" = aten.sin(x)
    r1: "f32[512, 1024]" = reduce_scatter(g1, ["dp"], 0, "sum")
    g2: "f32[1024, 1024]" = aten.cos(x)
    r2: "f32[512, 1024]" = reduce_scatter(g2, ["dp"], 0, "sum")
    g3: "f32[1024, 1024]" = aten.tanh(x)
    r3: "f32[512, 1024]" = reduce_scatter(g3, ["dp"], 0, "sum")
    u1: "f32[512, 1024]" = aten.neg(r1)
    u2: "f32[512, 1024]" = aten.neg(r2)
    u3: "f32[512, 1024]" = aten.neg(r3)
    return {"output:1": u1, "output:2": u2, "output:3": u3}
"""
ALONG_1 = """def main(x: "f32[1024, 1024]" = "input:x"):
    g: "f32[1024, 1024]" = aten.sin(x)
    r: "f32[1024, 512]" = reduce_scatter(g, ["dp"], 1, "sum")
    one: "f32[1024, 1024]" = aten.cos(x)
    two: "f32[1024, 1024]" = aten.neg(one)
    s: "f32[1024, 512]" = aten.neg(r)
    return {"output:s": s}
"""
GATHER = """def main(x: "f32[1024, 1024]" = "input:x"):
    half: "f32[1024, 512]" = aten.slice.Tensor(x, 1, 0, 512)
    y: "f32[1024, 512]" = aten.exp(half)
    whole: "f32[1024, 1024]" = all_gather(y, ["dp"], 1)
    total: "f32[]" = aten.sum(whole)
    return {"output:total": total}
"""
REGION = """def main(x: "f32[1024, 1024]" = "input:x"):
    g: "f32[1024, 1024]" = aten.sin(x)
    r: "f32[512, 1024]" = reduce_scatter(g, ["dp"], 0, "sum")
    a: "f32[1024, 1024]" = aten.cos(x)
    with region(0):
        b: "f32[1024, 1024]" = aten.mm(a, a)
        s: "f32[512, 1024]" = aten.neg(r)
    return {"output:s": s, "output:b": b}
"""


def program(*texts: str, schedule: tuple[Instruction, ...] = (Instruction("run", "main"),), **more: Any) -> PlainProgram:
    stages = {stage.name: stage for stage in map(parse_stage, texts)}
    given = (Port("input", "x", (1024, 1024), torch.float32),)
    return PlainProgram(stages, Mesh("dp=2"), Plan(""), given, (), schedule, axis_sizes={"dp": 2}, **more)


def named(stage: Stage) -> dict[str, Node]:
    return {node.name: node for node in stage.graph.nodes}


def test_reductions_that_nothing_reads_for_long_are_waited_for_in_turn() -> None:
    stage = parse_stage(SCATTERS)
    nodes = named(stage)
    assert in_flight.earlier_waits(stage.graph.nodes) == {nodes["r2"]: [nodes["r1"]], nodes["r3"]: [nodes["r2"]]}
    until = in_flight.waits(stage.graph.nodes)
    assert {one.name: until[one].name for one in until} == {"r1": "r2", "r2": "r3", "r3": "u3"}


def test_what_one_reads_is_there_until_it_has_been_waited_for() -> None:
    # g2 is still there when g3 is made, beside r1 and r2; of what nobody waited for g1 would be there too
    assert peak_memory.peak(program(SCATTERS)).total == (2 + 2 + 4 + 4) * MIB
    assert peak_memory.peak(program(REGION)).total == (4 + 2 + 4) * MIB  # what a region reads is waited for before the region: g has gone


def test_parts_that_are_copied_to_be_sent_are_there_beside() -> None:
    # with the copy and the result two more values, not with the operand too
    assert peak_memory.peak(program(ALONG_1)).total == (4 + 2 + 4 + 4) * MIB
    # parts come one behind the other, and are joined along the other dim once all are there
    assert peak_memory.peak(program(GATHER)).total == (4 + 4) * MIB


class Alone:
    """Groups of nobody."""

    sizes: ClassVar[dict[str, int]] = {"dp": 1}

    def group(self, axes: object) -> None:
        return None


def test_the_runtime_waits_where_the_walk_says(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Told:
        def __init__(self, name: str, value: torch.Tensor) -> None:
            self.name, self.value = name, value

        def wait(self) -> torch.Tensor:
            done.append(f"wait for {self.name}")
            return self.value

    def scatter(x: torch.Tensor, *_: object) -> Told:
        name = f"r{1 + sum(one.startswith('start') for one in done)}"
        done.append(f"start {name}")
        return Told(name, x[:512])

    monkeypatch.setattr(collectives, "scatter_dim", scatter)
    run = codegen.StageWriter(parse_stage(SCATTERS), Alone(), {"dp": 0}, torch.device("cpu")).function()  # type: ignore[arg-type]
    run([torch.zeros(1024, 1024)])
    assert done == ["start r1", "wait for r1", "start r2", "wait for r2", "start r3", "wait for r3"]


EACH = """def each(x: "f32[1024, 1024]" = "input:x"):
    g: "f32[1024, 1024]" = aten.sin(x)
    return {"part:g": g}
"""
START = """def start_g(g: "f32[1024, 1024]" = "sum:g"):
    r: "f32[512, 1024]" = reduce_scatter(g, ["dp"], 0, "sum")
    return {"early:r": r}
"""
AFTER = """def after(x: "f32[1024, 1024]" = "input:x", r: "f32[512, 1024]" = "early:r"):
    a: "f32[1024, 1024]" = aten.exp(x)
    total: "f32[]" = aten.sum(a)
    s: "f32[512, 1024]" = aten.neg(r)
    more: "f32[1024, 1024]" = aten.mm(s, s)
    return {"output:s": more, "output:total": total}
"""


def test_what_starts_early_holds_what_it_reads_until_another_stage_waits() -> None:
    add = Instruction("add", "each", 0, "part:g", "sum:g")
    start = Instruction("start", "start_g", 0, keys=("sum:g",), during="each")
    made = program(EACH, START, AFTER, schedule=(Instruction("run", "each"), add, start, Instruction("run", "after")))
    # beside r what it reads, while a is made; without it s and more would be the most
    assert peak_memory.peak(made).total == (2 + 4 + 4) * MIB + 4


def test_results_of_one_operator_are_each_there_as_long_as_they_are_read() -> None:
    text = """def main(x: "f32[1024, 1024]" = "input:x", w: "f32[1024]" = "input:w"):
    both: "(f32[1024, 1024], f32[1024, 1], f32[1024, 1])" = aten.native_layer_norm(x, [1024], w, w, 1e-05)
    first: "f32[1024, 1024]" = getitem(both, 0)
    mean: "f32[1024, 1]" = getitem(both, 1)
    total: "f32[]" = aten.sum(first)
    one: "f32[1024, 1024]" = aten.sin(x)
    two: "f32[1024, 1024]" = aten.sub.Tensor(one, mean)
    return {"output:total": total, "output:two": two}
"""
    made = program(text)
    assert peak_memory.peak(made).total == 8 * MIB + 4096 + 4
