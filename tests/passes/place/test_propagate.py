"""Propagation by the plan's meaning, told by the collectives that come of it on small graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from meshc.ir import record, spmd, value_of
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Sharding
from meshc.passes.partition.partition import Partitioner
from meshc.passes.phases.assignment import Assignment
from meshc.passes.place.factorize import factorize
from meshc.passes.place.find_factors import name_factors
from meshc.passes.place.propagate import Propagator
from meshc.plan.plan import Plan
from meshc.program.program import Port, Stage
from meshc.runtime.simulator.simulate import run_stage
from meshc.testing.rank_tiles import assemble, tiles
from tests.graphs import trace

aten = torch.ops.aten
ours = torch.ops.meshc


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass
class Split:
    """A function under a plan: what each rank runs, proved to give the function's result."""

    graph: Graph
    local: Graph
    assignment: Assignment
    propagator: Propagator

    @property
    def collectives(self) -> list[str]:
        found = [node for node in self.local.nodes if spmd.is_collective(node.target)]
        return [f"{node.target.__name__} {'/'.join(node.args[1])}" for node in found]  # type: ignore[union-attr, arg-type]

    def call(self, target: object, number: int = 0) -> Node:
        return [node for node in self.graph.nodes if node.target is target][number]

    def given(self, target: object, number: int = 0) -> str:
        return str(self.assignment.given[(self.call(target, number), 0)])

    def wanted(self, target: object, number: int = 0) -> list[str]:
        return [str(sharding) for sharding in self.assignment.wanted[self.call(target, number)]]


def split(
    function: Callable[..., object],
    plan: str,
    mesh: str,
    names: Mapping[str, tuple[str | None, ...]],
    outputs: str = "whole",
    **tensors: Tensor,
) -> Split:
    """Arguments called `w...` are parameters, stored as first used; others are inputs. Results leave whole, or as they lie (`outputs`)."""
    world = Mesh(mesh)
    sizes = {axis.name: axis.size for axis in world.axes}
    graph = trace(function, *tensors.values())
    placeholders = graph.find_nodes(op="placeholder")
    ports = []
    for node, name in zip(placeholders, tensors, strict=True):
        found = record(node)
        ports.append(Port("parameter" if name.startswith("w") else "input", name, found.shape, found.dtype or torch.float64))
    factors = factorize(graph)
    propagator = Propagator(graph, factors, name_factors(graph, factors, ports, names), Plan(plan), sizes, ports)
    assignment = propagator.assign_shardings()
    lies = [
        propagator.storage(port.name, "parameter") if port.kind == "parameter" else assignment.whole((node, 0))
        for port, node in zip(ports, placeholders, strict=True)
    ]
    (output,) = graph.find_nodes(op="output")
    values = [value_of(node) for node in output.args[0]]  # type: ignore[union-attr, arg-type]
    wants: list[Sharding] = [(assignment.given[value] if outputs == "given" else None) or assignment.whole(value) for value in values]
    stored = [replace(port, sharding=lie) for port, lie in zip(ports, lies, strict=True)]
    local = Partitioner(graph, assignment, stored, wants).build_graph()
    columns = [tiles(tensor, sharding, world) for tensor, sharding in zip(tensors.values(), lies, strict=True)]
    rows = [[column[rank] for column in columns] for rank in range(world.world_size)]
    ran = run_stage(Stage("main", local, (), ()), rows, world, sizes)
    expected = function(*tensors.values())
    for index, whole in enumerate(expected if isinstance(expected, tuple) else [expected]):
        torch.testing.assert_close(assemble([row[index] for row in ran], wants[index], world), whole)
    return Split(graph, local, assignment, propagator)


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return torch.relu(x @ w1) @ w2


MLP = {"x": f(4, 6), "w1": f(6, 10), "w2": f(10, 6)}
ROWS = {"x": ("batch", "hidden")}


# ----------------------------------------------------------------------------------------------------------------- plans


def test_column_then_row_is_one_all_reduce() -> None:
    found = split(mlp, "tp: ffn", "tp=2", ROWS, **MLP)
    assert found.collectives == ["all_reduce tp"]
    assert found.wanted(aten.mm.default, 0) == ["[batch 4, hidden 6]", "[hidden 6, ffn 10/tp]"]
    assert found.given(aten.mm.default, 0) == "[batch 4, ffn 10/tp]"
    assert found.given(aten.mm.default, 1) == "[batch 4, w2.1 6] partial(sum: tp)"
    assert str(found.propagator.storage("w2", "parameter")) == "[ffn 10/tp, w2.1 6]"


def test_sequence_parallelism_is_a_gather_and_a_reduce_scatter() -> None:
    """`> batch`: what has no ffn takes the rows, so the sum arrives as tiles."""

    def block(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return torch.tanh(torch.relu(torch.tanh(x) @ w1) @ w2)

    found = split(block, "tp: ffn > batch", "tp=2", ROWS, "given", **MLP)
    assert found.collectives == ["all_gather tp", "reduce_scatter tp"]


def test_data_parallelism_needs_nothing_forward() -> None:
    assert split(mlp, "dp: batch", "dp=2", ROWS, "given", **MLP).collectives == []


def test_stored_parameters_are_gathered_for_use() -> None:
    found = split(mlp, "dp: batch; store params, grads, state", "dp=2", ROWS, "given", **MLP)
    assert found.collectives == ["all_gather dp"] * 2
    assert str(found.propagator.storage("w1", "parameter")) == "[hidden 6/dp, ffn 10]"


def test_two_axes() -> None:
    found = split(mlp, "dp: batch\ntp: ffn", "dp=2,tp=3", ROWS, "given", **MLP)
    assert found.given(aten.mm.default, 1) == "[batch 4/dp, w2.1 6] partial(sum: tp)"
    assert found.collectives == []


def test_an_axis_takes_one_letter_of_an_operator() -> None:
    """Both dims of a Gram matrix are one class; the axis splits one of them, and the other operand is gathered."""
    found = split(lambda x: torch.relu(x) @ torch.relu(x).t(), "dp: batch", "dp=2", ROWS, "given", x=f(4, 6))
    assert found.given(aten.mm.default).count("/dp") == 1
    assert found.collectives == ["all_gather dp"]


def test_rank_order_decides() -> None:
    assert "batch 4, ffn 10/tp" in split(mlp, "tp: ffn > batch", "tp=2", ROWS, **MLP).given(aten.mm.default, 0)
    assert "batch 4/tp, ffn 10]" in split(mlp, "tp: batch > ffn", "tp=2", ROWS, **MLP).given(aten.mm.default, 0)


def test_an_axis_used_for_nothing() -> None:
    found = split(mlp, "tp: -", "tp=2", ROWS, **MLP)
    assert found.collectives == []
    assert all(not axes for axes in found.assignment.chosen.values())


# ---------------------------------------------------------------------------------------------------------------- partial sums


def test_the_sum_of_two_partial_sums_rides() -> None:
    """relu(x w1) w2 + relu(x w3) w4: one all-reduce, after the addition."""

    def two(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor) -> Tensor:
        return torch.relu(x @ w1) @ w2 + torch.relu(x @ w3) @ w4

    found = split(two, "tp: ffn", "tp=2", ROWS, **MLP, w3=f(6, 12), w4=f(12, 6))
    assert found.given(aten.add.Tensor).endswith("partial(sum: tp)")
    assert found.collectives == ["all_reduce tp"]


def test_a_partial_sum_rides_through_layouts_and_scaling() -> None:
    def scaled(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return (mlp(x, w1, w2).t() * 0.5).neg()

    found = split(scaled, "tp: ffn", "tp=2", ROWS, "given", **MLP)
    assert found.given(aten.neg.default).endswith("partial(sum: tp)")
    assert found.collectives == []


def test_a_partial_sum_stops_before_what_is_not_linear() -> None:
    found = split(lambda x, w1, w2: torch.tanh(mlp(x, w1, w2)), "tp: ffn", "tp=2", ROWS, "given", **MLP)
    assert found.wanted(aten.tanh.default) == ["[batch 4, w2.1 6]"]
    assert found.collectives == ["all_reduce tp"]


def test_a_partial_sum_stops_before_a_cast_that_rounds() -> None:
    def rounded(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return mlp(x, w1, w2).to(torch.float32).to(torch.float64)

    found = split(rounded, "tp: ffn", "tp=2", ROWS, "given", **MLP)
    assert found.collectives == ["all_reduce tp"]


def test_a_partial_sum_used_twice_is_reduced_once() -> None:
    def twice(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = mlp(x, w1, w2)
        return torch.tanh(h) * torch.sigmoid(h)

    assert split(twice, "tp: ffn", "tp=2", ROWS, **MLP).collectives == ["all_reduce tp"]


def test_a_mixed_addition_reduces_first() -> None:
    """A residual is no sum that waits: the product is reduced, and added whole."""
    found = split(lambda x, w1, w2: torch.relu(x) + mlp(x, w1, w2), "tp: ffn", "tp=2", ROWS, **MLP)
    assert found.wanted(aten.add.Tensor) == ["[batch 4, hidden 6]"] * 2
    assert found.collectives == ["all_reduce tp"]


def test_a_mixed_addition_before_another_defers() -> None:
    """(r + partial) + partial: the residual is kept on one coordinate, and one all-reduce serves both sums."""

    def chain(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor) -> Tensor:
        return (torch.relu(x) + mlp(x, w1, w2)) + torch.relu(x @ w3) @ w4

    found = split(chain, "tp: ffn", "tp=2", ROWS, **MLP, w3=f(6, 12), w4=f(12, 6))
    assert [node.target for node in found.local.nodes].count(spmd.keep_first) == 1
    assert found.collectives == ["all_reduce tp"]


def test_three_projections_backward() -> None:
    """Gradients through query, key and value add up before they are reduced, and with the residual's: one all-reduce each way."""

    def attention(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        out = x + (torch.tanh(x @ w1) * torch.sigmoid(x @ w2) * torch.relu(x @ w3)) @ w4
        return (out, *torch.autograd.grad(torch.cos(out).sum(), [x]))

    weights = {"w1": f(6, 10), "w2": f(6, 10), "w3": f(6, 10), "w4": f(10, 6)}
    found = split(attention, "tp: ffn", "tp=2", ROWS, x=f(4, 6), **weights)
    assert found.collectives == ["all_reduce tp"] * 2


# ------------------------------------------------------------------------------------------------------------- carry, free, layouts


def test_a_sum_keeps_the_split_that_it_finds() -> None:
    """A bias's gradient sums the rows; its columns stay as they lie, and nothing is sent."""
    found = split(_bias_gradient, "tp: ffn > batch", "tp=2", ROWS, "given", **MLP)
    assert found.given(aten.sum.dim_IntList) == "[ffn 10/tp]"
    assert found.collectives == []


def _bias_gradient(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, ...]:
    h = torch.relu(x @ w1)
    return h.sum(0), h @ w2


def test_a_sum_over_a_split_dim_is_partial() -> None:
    found = split(lambda x: torch.relu(x).sum(), "dp: batch", "dp=2", ROWS, x=f(5, 6))
    assert found.given(aten.sum.default) == "[] partial(sum: dp)"
    assert found.collectives == ["all_reduce dp"]


def test_free_values_are_made_where_they_are_wanted() -> None:
    """A causal mask depends on nothing that is computed: each rank makes its rows of it."""

    def masked(x: Tensor) -> Tensor:
        position = torch.arange(x.shape[0])
        causal = position[:, None] >= position[None, :]
        return torch.relu(x).masked_fill(causal, 0.0)

    found = split(masked, "dp: batch", "dp=2", ROWS, "given", x=f(5, 5))
    assert found.collectives == []
    assert found.call(aten.ge.Tensor) in found.assignment.free
    rows = [node for node in found.local.nodes if node.target is aten.ge.Tensor]
    assert [node.meta["meshc"].shape for node in rows] == [(3, 5)]


def test_flattened_rows_stay_split_by_batch() -> None:
    def flat(x: Tensor, w1: Tensor) -> Tensor:
        return torch.relu((torch.tanh(x).view(12, 6) @ w1).view(4, 3, 10))

    found = split(flat, "dp: batch", "dp=2", {"x": ("batch", "seq", None)}, "given", x=f(4, 3, 6), w1=f(6, 10))
    assert found.given(aten.mm.default) == "[batch 4/dp * seq 3, w1.1 10]"
    assert found.collectives == []


def test_heads_of_a_fused_weight() -> None:
    """Query, key and value in one weight: each rank has its heads of all three, and the way out leaves one sum."""

    def fused(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        q, k, v = (part.view(2, 5, 4, 6).transpose(1, 2) for part in F.linear(x, w1).split(24, -1))
        out = ours.attention(q, k, v, None, True, 0.5)[0]
        return F.linear(out.transpose(1, 2).reshape(2, 5, 24), w2)

    found = split(fused, "tp: heads", "tp=2", {"x": ("batch", "seq", "hidden")}, x=f(2, 5, 16), w1=f(72, 16), w2=f(16, 24))
    assert found.collectives == ["all_reduce tp"]
    assert str(found.propagator.storage("w1", "parameter")).startswith("[w1.0.0 3 * heads 4/tp * head 6, hidden 16]")


def test_vocabulary_split_cross_entropy() -> None:
    """Logits never come together: the maximum, the sum and the picked entries, each of one number a row, are all that is reduced."""

    def loss(x: Tensor, w1: Tensor, labels: Tensor) -> Tensor:
        return -ours.take(torch.log_softmax(x @ w1, -1), labels, -100).sum()

    found = split(loss, "tp: vocab", "tp=2", ROWS, x=f(4, 6), w1=f(6, 7), labels=torch.tensor([0, 6, -100, 3]))
    sent = [node.args[0].meta["meshc"].shape for node in found.local.nodes if spmd.is_collective(node.target)]  # type: ignore[union-attr]
    assert found.collectives == ["all_reduce tp"] * 3
    assert sorted(sent) == [(), (4, 1), (4, 1)]


def test_an_axis_larger_than_a_factor_is_not_wasted_on_it() -> None:
    """Two heads on four ranks: a factor that has room is preferred."""

    def both(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return torch.relu(x @ w1) @ w2

    found = split(both, "tp: batch, ffn", "tp=4", ROWS, x=f(2, 6), w1=f(6, 8), w2=f(8, 6))
    assert found.given(aten.mm.default, 0) == "[batch 2, ffn 8/tp]"
