"""What is in memory at the peak: values that add up to it, from what makes them to what reads them last."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from meshc.cost import peak_memory
from meshc.cost.liveness import peak_liveness
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from tests.broad import broad
from tests.cost.building import Building
from tests.golden.cases import CASES

aten = torch.ops.aten


def by_hand() -> PlainProgram:
    """x [10, 10] -> h [10, 50] -> a [10, 50] -> y [10, 20]; h is read once more at the end."""
    made = Building()
    x, w, v = made.given(10, 10), made.given(10, 50), made.given(50, 20)
    h = made.call(aten.mm.default, x, w, made=(10, 50))
    a = made.call(aten.gelu.default, h, made=(10, 50))
    y = made.call(aten.mm.default, a, v, made=(10, 20))
    z = made.call(aten.sum.default, h, made=())
    made.graph.output([y, z])
    shapes = {"input:x": (10, 10), "parameter:w": (10, 50), "parameter:v": (50, 20)}
    ports = [Port(kind, name, shape, torch.float32) for key, shape in shapes.items() for kind, name in [key.split(":")]]  # type: ignore[arg-type]
    outputs = (Port("output", "y", (10, 20), torch.float32), Port("output", "z", (), torch.float32))
    stage = Stage("main", made.graph, tuple(shapes), ("output:y", "output:z"))
    return PlainProgram({"main": stage}, Mesh("dp=1"), Plan("dp: -"), tuple(ports), outputs, (Instruction("run", "main"),))


def test_values_at_the_peak_with_who_makes_and_who_reads_them() -> None:
    found = peak_liveness(by_hand())
    assert [size for size, _ in found.course] == [0, 0, 0, 2000, 4000, 4800, 2804, 804]
    assert found.course[found.peak][0] == found.holds.peak.total == 4800
    lives = [(one.bytes, one.made and one.made.node.name, one.until and one.until.node.name) for one in found.values]
    assert lives == [(2000, "mm_default", "sum_default"), (2000, "gelu_default", "mm_default_1"), (800, "mm_default_1", None)]


@pytest.mark.parametrize("name", ["gpt pipeline", broad("gpt fsdp microbatches")])
def test_values_add_up_to_the_peak(name: str) -> None:
    program = CASES[name]().compiled
    found = peak_liveness(program)
    peak = peak_memory.peak_rank(program).peak
    assert sum(one.bytes for one in found.values) == peak.total == found.course[found.peak][0] == max(size for size, _ in found.course)
    assert sum(one.bytes for one in found.values if one.gradient) == peak.gradients > 0
    waits = Counter(one.key.partition(":")[0] for one in found.values)
    assert waits["flow" if name == "gpt pipeline" else "sum"] > 0
    phases = [(one.made.record.phase, one.until.record.phase) for one in found.values if one.made and one.until]
    assert ("forward", "backward") in phases
    assert [phase for _, phase in found.course][0] == "forward" and [phase for _, phase in found.course][-1] == "update"
