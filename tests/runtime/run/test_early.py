"""Reductions that start while the last microbatch runs: which, when, and that the stage after it means the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from meshc.ir import Record, set_record, spmd
from meshc.program.program import Instruction, Stage
from meshc.runtime.comm.collectives import Pending
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run.codegen import generate
from meshc.runtime.run.early import EARLY, Early, made_whole, without_early

aten = torch.ops.aten
KEYS = ("sum:a", "sum:b", "sum:c", "sum:tied", "parameter:w")


def call(graph: Graph, target: Any, *args: object) -> Node:
    node = graph.call_function(target, args)
    set_record(node, Record((2,), torch.float32))
    return node


def late() -> Stage:
    """a and b are reduced together, c alone and read beside that; the tied one comes from elsewhere; w is no gradient."""
    graph = Graph()
    a, b, c, tied, w = (graph.placeholder(key.replace(":", "_")) for key in KEYS)
    together = call(graph, spmd.all_reduce, call(graph, aten.cat.default, [a, b]), ["dp"], "sum")
    alone = call(graph, spmd.all_reduce, c, ["dp"], "sum")
    other = call(graph, spmd.all_reduce, tied, ["dp"], "sum")
    mixed = call(graph, spmd.all_reduce, call(graph, aten.mul.Tensor, c, w), ["dp"], "sum")
    stages = call(graph, spmd.all_reduce, c, ["pp"], "sum")
    call(graph, spmd.all_reduce, call(graph, aten.neg.default, w), ["pp"], "sum")  # other ranks want it
    twice = call(graph, spmd.all_reduce, together, ["dp"], "sum")
    graph.output((together, alone, other, mixed, stages, twice))
    return Stage("after_0", graph, KEYS, tuple(f"output:{index}" for index in range(6)))


WHOLE = {"sum:a": 1, "sum:b": 1, "sum:c": 4}


def load(stage: Stage) -> Any:
    groups = Groups({"dp": 1, "pp": 1}, 0, 1)
    groups.prepare([("dp",), ("pp",)])
    return generate(stage, groups, {"dp": 0, "pp": 0}, torch.device("cpu"))


def test_what_depends_on_whole_sums_alone_starts_early() -> None:
    rest, found = without_early(late(), WHOLE)
    assert [(one.key, one.stage.inputs) for one in found] == [
        (EARLY + "all_reduce", ("sum:a", "sum:b")), (EARLY + "all_reduce_1", ("sum:c",))
    ]  # fmt: skip
    assert rest.inputs == ("sum:c", "sum:tied", "parameter:w", EARLY + "all_reduce", EARLY + "all_reduce_1")
    left = [node.args[1] for node in rest.graph.nodes if spmd.is_collective(node.target)]
    assert left == [["dp"], ["dp"], ["pp"], ["pp"], ["dp"]]


def test_nothing_early_leaves_the_stage_alone() -> None:
    stage = late()
    assert without_early(stage, {}) == (stage, [])


def test_each_starts_when_the_last_of_its_sums_is_whole_and_the_rest_gets_it() -> None:
    stage = late()
    rest, found = without_early(stage, WHOLE)
    started: list[str] = []

    def start(one: Stage) -> Any:
        run = load(one)

        def starting(sums: list[Any]) -> list[Any]:
            started.append(one.outputs[0])
            return run(sums)

        return starting

    early = Early(found, WHOLE, rest.inputs, start)
    for _ in range(2):  # calls
        values = [torch.randn(2) for _ in KEYS]
        env: dict[str, Any] = dict(zip(KEYS, values, strict=True))
        expected = load(stage)(list(values))
        early.begin()
        started.clear()
        assert early.finishing(0, env) is None
        first, last = early.finishing(1, env), early.finishing(4, env)
        assert first is not None and last is not None
        first("sum:a")
        first("sum:c")  # not yet for the last time
        assert not started
        first("sum:b")
        assert started == [EARLY + "all_reduce"] and isinstance(env[EARLY + "all_reduce"], Pending)
        assert "sum:a" not in env and "sum:c" in env  # what nothing else reads is gone
        last("sum:c")
        assert started == [EARLY + "all_reduce", EARLY + "all_reduce_1"]
        torch.testing.assert_close(load(rest)([env[key] for key in rest.inputs]), expected, rtol=0, atol=0)


def test_a_sum_is_whole_after_the_last_run_that_adds_to_it() -> None:
    stages = {
        "backward_0": Stage("backward_0", Graph(), (), ("part:a", "part:tied", "flow:x", "rows:y")),
        "backward_1": Stage("backward_1", Graph(), (), ("part:a", "high:m")),
    }
    steps = [Instruction("run", name, k) for k in range(2) for name in stages]
    steps.append(Instruction("recv", keys=("sum:tied",), peer=1))
    assert made_whole(steps, stages) == {"sum:a": 3, "largest:m": 3}
