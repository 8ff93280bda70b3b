"""Reductions that start while the last microbatch runs: which, when, in which order, and that the program means the same."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph, Node

import meshc
from meshc.check import check_program
from meshc.ir import Record, set_record, spmd
from meshc.ir.regions import set_region
from meshc.passes.lower.start_reductions_early import accumulation_order, reductions, whole_sums
from meshc.program.program import Instruction, Stage
from meshc.program.rank_instructions import ranks_of, steps_of
from tests import models
from tests.broad import broad
from tests.passes.stepped import around, body, changed

aten = torch.ops.aten


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def sgd(microbatches: int) -> meshc.TrainStep:
    model = Affine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return meshc.TrainStep(model, optimizer=optimizer, loss=lambda out, target: (out - target).square().mean(), microbatches=microbatches)


def test_reductions_of_sums_become_stages_that_start_behind_the_last_run() -> None:
    given = {"x": torch.zeros(8, 4), "target": torch.zeros(8, 4)}
    before, after = around("start", sgd(2), "dp=2", **given)
    assert_expected_inline(body(after, "start_all_reduce_6"), """\
reshape_default_2: "f32[1]" = aten.reshape(all_reduce_4, [-1])
reshape_default_3: "f32[4]" = aten.reshape(all_reduce_2, [-1])
reshape_default_4: "f32[4]" = aten.reshape(all_reduce, [-1])
cat_default: "f32[9]" = aten.cat([reshape_default_2, reshape_default_3, reshape_default_4])
all_reduce_6: "f32[9]" = all_reduce(cat_default, ["dp"], "sum")
return {
    "early:all_reduce_6": all_reduce_6,
}
""")
    assert_expected_inline(schedule(before), """\
run(stage="each", microbatch=1),
    add(stage="each", microbatch=1, value="part:sum_dim_int_list_1", into="sum:sum_dim_int_list_1"),
    add(stage="each", microbatch=1, value="part:sum_dim_int_list", into="sum:sum_dim_int_list"),
    add(stage="each", microbatch=1, value="part:mul_tensor_1", into="sum:mul_tensor_1"),
    run(stage="after"),
]
""")
    assert_expected_inline(schedule(after), """\
run(stage="each", microbatch=1),
    add(stage="each", microbatch=1, value="part:sum_dim_int_list_1", into="sum:sum_dim_int_list_1"),
    add(stage="each", microbatch=1, value="part:sum_dim_int_list", into="sum:sum_dim_int_list"),
    add(stage="each", microbatch=1, value="part:mul_tensor_1", into="sum:mul_tensor_1"),
    start(stage="start_all_reduce_6", microbatch=1, keys=("sum:sum_dim_int_list_1", "sum:sum_dim_int_list", "sum:mul_tensor_1"), during="each"),
    run(stage="after"),
]
""")
    taken = [line for line in body(before, "after").splitlines() if line not in body(after, "after").splitlines()]
    assert taken == body(after, "start_all_reduce_6").splitlines()[:5]


def schedule(text: str) -> str:
    """The last lines of a list, from the second run on."""
    return text[text.rindex('run(stage="each"') :]


def test_without_microbatches_nothing_changes() -> None:
    assert changed(*around("start", sgd(1), "dp=2", x=torch.zeros(8, 4), target=torch.zeros(8, 4))) == ""


def call(graph: Graph, target: Any, *args: object) -> Node:
    node = graph.call_function(target, args)
    set_record(node, Record((2,), torch.float32))
    return node


def late() -> Stage:
    """a and b are reduced together, c alone and read beside that; the tied one comes from elsewhere; w is no gradient."""
    graph = Graph()
    keys = ("sum:a", "sum:b", "sum:c", "sum:tied", "parameter:w")
    a, b, c, tied, w = (graph.placeholder(key.replace(":", "_")) for key in keys)
    together = call(graph, spmd.all_reduce, call(graph, aten.cat.default, [a, b]), ["dp"], "sum")
    alone = call(graph, spmd.all_reduce, c, ["dp"], "sum")
    other = call(graph, spmd.all_reduce, tied, ["dp"], "sum")
    mixed = call(graph, spmd.all_reduce, call(graph, aten.mul.Tensor, c, w), ["dp"], "sum")
    stages = call(graph, spmd.all_reduce, c, ["pp"], "sum")
    twice = call(graph, spmd.all_reduce, together, ["dp"], "sum")
    graph.output((together, alone, other, mixed, stages, twice))
    return Stage("after_0", graph, keys, tuple(f"output:{index}" for index in range(6)))


def test_what_is_made_of_whole_sums_alone_may_start() -> None:
    assert [node.name for node in reductions(late(), {"sum:a", "sum:b", "sum:c"})] == ["all_reduce", "all_reduce_1"]
    assert reductions(late(), {"sum:a"}) == []


def test_a_sum_is_whole_after_the_last_run_that_adds_to_it() -> None:
    stages = {
        "backward_0": Stage("backward_0", Graph(), (), ("part:a", "part:tied", "flow:x", "rows:y")),
        "backward_1": Stage("backward_1", Graph(), (), ("part:a", "high:m")),
    }
    steps = [Instruction("run", name, k) for k in range(2) for name in stages]
    steps.append(Instruction("recv", keys=("sum:tied",), peer=1))
    assert whole_sums(stages, steps) == {"sum:a": 3, "largest:m": 3}


def test_a_collective_goes_into_its_sum_when_it_is_waited_for_and_a_region_at_its_end() -> None:
    """r is first read in the region, which waits for it before it begins; s is read by nothing."""
    graph = Graph()
    x = graph.placeholder("x")
    r = call(graph, spmd.all_reduce, x, ["dp"], "sum")
    s = call(graph, spmd.all_reduce, x, ["dp"], "max")
    first = call(graph, aten.neg.default, x)
    inside = [call(graph, aten.relu.default, first), call(graph, aten.relu.default, r)]
    last = call(graph, aten.exp.default, x)
    graph.output((s, last, inside[1], inside[0], first, r, x))
    stage = Stage("each", graph, ("input:x",), ("high:s", "part:last", "part:b", "part:a", "part:first", "part:r", "rows:x"))
    assert accumulation_order(stage) == ["sum:first", "sum:a", "sum:r", "sum:b", "sum:last", "largest:s"]
    for node in inside:
        set_region(node, 0)
    assert accumulation_order(stage) == ["sum:first", "sum:r", "sum:a", "sum:b", "sum:last", "largest:s"]


@pytest.mark.parametrize("mesh, backend", [("dp=2", "eager"), broad("pp=2,dp_shard=2", "inductor")])
def test_programs_that_start_early_mean_what_they_meant(mesh: str, backend: str) -> None:
    """Every rank starts what it reduces, in the order in which its last microbatch makes it, and the simulator plays that."""
    case = models.nanogpt(batch=4, seq=8, hidden=16, layers=1, heads=4, vocab=13)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=2)
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, backend=backend)
    compiled = program.compiled
    check_program(compiled, "the program")
    for rank in ranks_of(compiled):
        steps = steps_of(compiled, rank)
        starts = [one for one in steps if one.op == "start"]
        assert starts and {one.microbatch for one in starts} == {1}
        for one in starts:
            taken = accumulation_order(compiled.stages[one.during])
            at = [max(taken.index(key) for key in other.keys if key in taken) for other in starts if other.during == one.during]
            assert at == sorted(at)
        late = compiled.stages[steps[-1].stage]
        assert {key for one in starts for key in compiled.stages[one.stage].outputs} <= set(late.inputs)
        assert not reductions(late, whole_sums(compiled.stages, steps))
    assert meshc.verify(program).ok
