"""Buckets: the same values on every rank from fewer collectives."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from meshc.check import phases
from meshc.ir import Record, record, set_record, spmd
from meshc.ir.mesh import Mesh
from meshc.program.bucket import ALONE, BUCKET, bucket
from meshc.program.program import Stage
from meshc.runtime.simulator.simulate import run_stage

aten = torch.ops.aten
MESHES = [Mesh("a=2"), Mesh("a=3"), Mesh("a=2,b=3")]


class Building:
    """A stage in the making, of nodes with records."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sizes = mesh, {axis.name: axis.size for axis in mesh.axes}
        self.graph = Graph()
        self.keys: list[str] = []

    def stored(self, shape: tuple[int, ...]) -> Node:
        node = self.graph.placeholder(f"w{len(self.keys)}")
        self.keys.append(f"parameter:{node.name}")
        set_record(node, Record(shape, torch.float64))
        return node

    def add(self, target: object, *args: object, shape: tuple[int, ...], phase: str = "backward") -> Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        set_record(node, Record(shape, torch.float64, phase=phase, reason=f"reason {node.name}"))
        return node

    def done(self, results: list[Node]) -> Stage:
        self.graph.output(results)
        return Stage("main", self.graph, tuple(self.keys), tuple(f"gradient:{index}" for index in range(len(results))))


def outputs(stage: Stage, mesh: Mesh, sizes: dict[str, int]) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [node.meta["meshc"].shape for node in stage.graph.find_nodes(op="placeholder")]
    rows = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(mesh.world_size)]
    return run_stage(stage, rows, mesh, sizes)


def count(stage: Stage) -> int:
    return sum(spmd.is_collective(node.target) for node in stage.graph.nodes)


@st.composite
def stages(draw: st.DrawFn) -> tuple[Building, Stage]:
    """Collectives of every kind that can be bucketed, along any dim of values of one to three dims, in any order."""
    building = Building(draw(st.sampled_from(MESHES)))
    axes = draw(st.sampled_from([["a"], ["b"], ["a", "b"]])) if len(building.sizes) > 1 else ["a"]
    ranks = 1
    for axis in axes:
        ranks *= building.sizes[axis]
    results = []
    wholes = [building.stored(tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))) for _ in range(draw(st.integers(2, 6)))]
    for whole in wholes:
        shape = whole.meta["meshc"].shape
        kind = draw(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "all_reduce":
            made = building.add(aten.mul.Tensor, whole, 2.0, shape=shape)
            found = building.add(spmd.all_reduce, made, axes, draw(st.sampled_from(["sum", "max"])), shape=shape)
        elif kind == "all_gather":
            shape = tuple(size * (ranks if at == dim else 1) for at, size in enumerate(shape))
            found = building.add(spmd.all_gather, whole, axes, dim, shape=shape, phase=draw(st.sampled_from(["forward", "backward"])))
        else:
            repeats = [ranks if at == dim else 1 for at in range(len(shape))]
            wide = tuple(size * times for size, times in zip(shape, repeats, strict=True))
            made = building.add(aten.repeat.default, whole, repeats, shape=wide)
            found = building.add(spmd.reduce_scatter, made, axes, dim, "sum", shape=shape)
            found = building.add(aten.reshape.default, found, [-1], shape=(found.meta["meshc"].shape and torch.Size(shape).numel(),))
        results.append(found)
    return building, building.done(results)


@settings(max_examples=200)
@given(stages())
def test_every_rank_has_the_same_values(made: tuple[Building, Stage]) -> None:
    building, stage = made
    alone = Stage(stage.name, copy.deepcopy(stage.graph), stage.inputs, stage.outputs)
    wanted = outputs(alone, building.mesh, building.sizes)
    bucket(stage, building.sizes, dict.fromkeys(stage.graph.nodes, 0))
    stage.graph.lint()
    assert count(stage) <= count(alone)
    for found, expected in zip(outputs(stage, building.mesh, building.sizes), wanted, strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def gradients(shapes: list[tuple[int, ...]]) -> tuple[Building, Stage]:
    building = Building(Mesh("a=2"))
    weights = [building.stored(shape) for shape in shapes]
    made = [building.add(aten.mul.Tensor, weight, 2.0, shape=weight.meta["meshc"].shape) for weight in weights]
    return building, building.done([building.add(spmd.all_reduce, node, ["a"], "sum", shape=node.meta["meshc"].shape) for node in made])


def sent(stage: Stage) -> list[int]:
    """Elements of each all-reduce."""
    found = []
    for node in stage.graph.find_nodes(op="call_function", target=spmd.all_reduce):
        size = 1
        for length in node.meta["meshc"].shape:
            size *= length
        found.append(size)
    return found


def test_gradients_go_in_four_buckets_or_so() -> None:
    building, stage = gradients([(512, 512)] * 32)  # 2 MiB each
    bucket(stage, building.sizes)
    assert sent(stage) == [8 * 512 * 512] * 4


def test_a_small_models_gradients_go_in_fewer() -> None:
    building, stage = gradients([(256, 512)] * 20)  # 1 MiB each
    bucket(stage, building.sizes)
    assert sent(stage) == [8 * 256 * 512, 8 * 256 * 512, 4 * 256 * 512]


def test_a_bucket_has_a_least_size() -> None:
    for each, alike in ((16, [8, 8]), (9, [4, 4, 1])):
        building, stage = gradients([(64, 512)] * each)  # 256 KiB each
        bucket(stage, building.sizes)
        assert sent(stage) == [count * 64 * 512 for count in alike]


def test_a_bucket_has_an_upper_size() -> None:
    building, stage = gradients([(512, 1024)] * 64)  # 4 MiB each
    bucket(stage, building.sizes)
    assert sum(sent(stage)) == 64 * 512 * 1024
    assert max(sent(stage)) * 8 <= BUCKET < (max(sent(stage)) + 512 * 1024) * 8


def test_a_large_gradient_travels_alone() -> None:
    building, stage = gradients([(ALONE // 8,), (8,), (8,)])
    bucket(stage, building.sizes)
    assert sorted(sent(stage)) == [16, ALONE // 8]


def gathers(dtypes: list[torch.dtype]) -> tuple[Building, Stage, list[Node]]:
    building = Building(Mesh("a=2"))
    found = []
    for dtype in dtypes:
        weight = building.stored((4, 4))
        found.append(building.add(spmd.all_gather, weight, ["a"], 0, shape=(8, 4)))
        for node in (weight, found[-1]):
            set_record(node, replace(record(node), dtype=dtype))
    return building, building.done(found), found


def test_what_nobody_says_may_travel_together_stays_apart() -> None:
    building, stage, _ = gathers([torch.float64] * 3)
    before = str(stage.graph)
    assert bucket(stage, building.sizes) == []
    assert str(stage.graph) == before


def test_values_of_one_number_and_dtype_travel_together() -> None:
    building, stage, found = gathers([torch.float64, torch.bfloat16, torch.float64, torch.bfloat16, torch.float64])
    made = bucket(stage, building.sizes, dict(zip(found, [0, 0, 0, 0, 1], strict=True)))
    assert [one.members for one in made] == [(found[0], found[2]), (found[1], found[3])]


def test_a_large_value_is_not_copied_into_company() -> None:
    building, stage, found = gathers([torch.float64] * 3)
    assert bucket(stage, building.sizes, dict.fromkeys(found, 0), alone=8 * 4 * 8) == []


def test_what_is_read_before_the_next_can_start_is_not_held_up() -> None:
    """r2 depends on r1."""
    building = Building(Mesh("a=2"))
    weight = building.stored((4,))
    first = building.add(spmd.all_reduce, building.add(aten.mul.Tensor, weight, 2.0, shape=(4,)), ["a"], "sum", shape=(4,))
    second = building.add(spmd.all_reduce, building.add(aten.exp.default, first, shape=(4,)), ["a"], "sum", shape=(4,))
    stage = building.done([second])
    bucket(stage, building.sizes)
    assert sent(stage) == [4, 4]


def test_the_bucket_says_what_it_is_for() -> None:
    building, stage = gradients([(4,), (5,), (6,)])
    bucket(stage, building.sizes)
    (node,) = stage.graph.find_nodes(op="call_function", target=spmd.all_reduce)
    assert node.meta["meshc"].reason == "3 reductions together: reason all_reduce | reason all_reduce_1, and 1 more"


def test_who_keeps_a_loss_keeps_no_gradients() -> None:
    building, stage = gradients([(1,), (64, 64), (64,)])
    given = replace(stage, outputs=("output:loss", *stage.outputs[1:]))
    wanted = outputs(stage, building.mesh, building.sizes)
    bucket(given, building.sizes)
    assert sent(given) == [1 + 64 * 64 + 64]
    for (loss, *rest), expected in zip(outputs(given, building.mesh, building.sizes), wanted, strict=True):
        torch.testing.assert_close([loss, *rest], expected, rtol=0, atol=0)
        assert loss.untyped_storage().nbytes() == loss.nbytes
        assert all(one.untyped_storage().nbytes() > one.nbytes for one in rest)


def test_a_message_is_of_the_latest_phase_that_it_carries() -> None:
    """Reductions of forward may stand behind those of backward; one that forward goes on with does not wait for what backward makes."""
    building = Building(MESHES[0])
    gradient, loss = (building.stored((3,)) for _ in range(2))
    made = building.add(aten.mul.Tensor, gradient, 2.0, shape=(3,))
    first = building.add(spmd.all_reduce, made, ["a"], "sum", shape=(3,))
    mean = building.add(aten.mul.Tensor, loss, 2.0, shape=(3,), phase="forward")
    results = [first, building.add(spmd.all_reduce, mean, ["a"], "sum", shape=(3,), phase="forward")]
    stage = building.done(results)
    bucket(stage, building.sizes)
    assert count(stage) == 1 and not list(phases.faults(stage))

    building = Building(MESHES[0])
    gradient, loss = (building.stored((3,)) for _ in range(2))
    made = building.add(aten.mul.Tensor, gradient, 2.0, shape=(3,))
    first = building.add(spmd.all_reduce, made, ["a"], "sum", shape=(3,))
    mean = building.add(aten.mul.Tensor, loss, 2.0, shape=(3,), phase="forward")
    second = building.add(spmd.all_reduce, mean, ["a"], "sum", shape=(3,), phase="forward")
    stage = building.done([first, building.add(aten.mul.Tensor, second, 2.0, shape=(3,), phase="forward")])
    bucket(stage, building.sizes)
    assert count(stage) == 2 and not list(phases.faults(stage))
