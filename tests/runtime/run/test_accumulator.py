"""What microbatches give is taken into its sum by the stage that makes it, and nothing else changes by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from meshc.cost import peak_memory
from meshc.errors import StateError
from meshc.ir import Record, set_record
from meshc.ir.mesh import Mesh
from meshc.passes.lower.group_regions import group_stage
from meshc.plan.plan import Plan
from meshc.program import packing
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run.codegen import generate
from meshc.runtime.run.executor import Executor
from meshc.runtime.run.inductor import compile_regions

aten = torch.ops.aten
CASES = [(generate, names) for names in (("product", "turned", "corner"), ("used",), ("x",), ("product", "product"))]
CASES.append((compile_regions, ("product", "turned", "corner", "used", "x")))


def call(graph: Graph, target: Any, *args: object, shape: tuple[int, ...] = (4, 4)) -> Node:
    node = graph.call_function(target, args)
    set_record(node, Record(shape, torch.float32))
    return node


def stage_of(**outputs: str) -> Stage:
    """Outputs by what they are: `x` itself, `product` of x and y, the transpose `turned` of another, a `corner` of one, and `used`,
    of which `after` is made."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node in (x, y):
        set_record(node, Record((4, 4), torch.float32))
    made: dict[str, Any] = {"x": x}
    made["product"] = call(graph, aten.mm.default, x, y)
    made["whole"] = call(graph, aten.mm.default, y, x)
    made["turned"] = call(graph, aten.t.default, made["whole"])
    made["corner"] = call(graph, aten.slice.Tensor, call(graph, aten.exp.default, y), 0, 0, 2, shape=(2, 4))
    made["used"] = call(graph, aten.sin.default, x)
    made["after"] = call(graph, aten.mul.Tensor, made["used"], y)
    graph.output(tuple(made[name] for name in outputs.values()))
    return Stage("each", graph, ("input:x", "value:y"), tuple(f"{key.replace('__', ':')}" for key in outputs))


def expected(name: str, x: Tensor, y: Tensor) -> Tensor:
    found = {"x": x, "product": x @ y, "turned": (y @ x).t(), "corner": y.exp()[:2], "used": x.sin(), "after": x.sin() * y}
    return found[name]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(3)]


@pytest.mark.parametrize("make, names", CASES, ids=lambda one: one.__name__ if callable(one) else " ".join(one))
def test_parts_are_added_up_and_nothing_else_is_written(make: Any, names: tuple[str, ...]) -> None:
    """Also of a part that is returned under another key, one that is an input, one that looks into a larger storage."""
    keys = {f"part__{index}": name for index, name in enumerate(names)}
    stage = stage_of(**keys, flow__kept=names[0], flow__after="after")
    run = make(group_stage(stage, {"dp": 1}), Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu"))
    env: dict[str, Any] = {}
    kept = []
    for x, y in batches():
        kept.append((x.clone(), y.clone(), [x, y], run([x, y], 0, env)))
    for index, name in enumerate(names):
        torch.testing.assert_close(env[f"sum:{index}"], sum(expected(name, x, y) for x, y, _, _ in kept))
    for x, y, given, results in kept:
        torch.testing.assert_close(given, [x, y], rtol=0, atol=0)
        torch.testing.assert_close(results, [expected(names[0], x, y), expected("after", x, y)])


def test_largest_and_smallest() -> None:
    run = generate(stage_of(high__a="product", low__b="used"), Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu"))
    env: dict[str, Any] = {}
    assert all(run([x, y], 0, env) == [] for x, y in batches())
    torch.testing.assert_close(env["largest:a"], torch.stack([x @ y for x, y in batches()]).amax(0))
    torch.testing.assert_close(env["smallest:b"], torch.stack([x.sin() for x, _ in batches()]).amin(0))


def test_what_may_be_written_after_its_stage() -> None:
    stage = stage_of(part__0="product", part__1="turned", part__2="used", part__3="x")
    found = dict(zip(stage.outputs, stage.graph.find_nodes(op="output")[0].args[0], strict=True))
    assert [packing.is_alone(found[f"part:{index}"]) for index in range(4)] == [True, True, False, False]


def program(schedule: tuple[Instruction, ...]) -> PlainProgram:
    stage = stage_of(part__0="product", part__1="turned")
    ports = tuple(Port(kind, name, (4, 4), torch.float32) for kind, name in (("input", "x"), ("constant", "y")))
    stage = Stage(stage.name, stage.graph, ("input:x", "constant:y"), stage.outputs)
    constants = {"y": torch.ones(4, 4)}
    return PlainProgram({"each": stage}, Mesh("dp=1"), Plan("dp: -"), ports, (), schedule, constants, {"dp": 1, "mb": 2}, 2)


RUN = [Instruction("run", "each", k) for k in range(2)]
ADD = [[Instruction("add", "each", k, f"part:{n}", f"sum:{n}") for n in range(2)] for k in range(2)]


def load(*schedule: Instruction) -> Executor:
    return Executor(program(schedule), Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu"))


def test_the_executor_does_what_the_list_says() -> None:
    x = torch.randn(4, 4)
    env = load(RUN[0], *ADD[0], RUN[1], *ADD[1]).run({"input:x": x})
    torch.testing.assert_close(env["sum:0"], 2 * x @ torch.ones(4, 4))
    assert not any(key.startswith("part:") for key in env)


@pytest.mark.parametrize(
    "schedule, said",
    [
        ((RUN[0], ADD[0][0], RUN[1], *ADD[1]), r"does nothing with part:1: its sum takes it in right after"),
        ((RUN[0], *ADD[0], ADD[0][1]), r"takes part:1 into sum:1 where no run of a stage has just made it"),
        ((RUN[0],), r"does nothing with part:0"),
    ],
)
def test_a_list_that_adds_otherwise_is_refused(schedule: tuple[Instruction, ...], said: str) -> None:
    with pytest.raises(StateError, match=said):
        load(*schedule)


def test_memory_of_a_later_microbatch_has_each_part_only_until_it_is_added() -> None:
    stage = stage_of(part__0="product", part__1="turned")
    first, later = (peak_memory.StageLiveness(stage).peak({}, summed).peak.total for summed in (False, True))
    assert (first, later) == (4 * 64, 2 * 64)  # product, whole, used and after; used and after
