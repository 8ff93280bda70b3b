"""Partition under any choice: every operator splits whatever it likes that its rule allows, and the ranks still give the whole result.

`Choosy` replaces what the plan would choose by chance, so that every edge of a graph carries some reshard; operands arrive and results
leave in shardings drawn as well. Padding that is not promised to be zero holds NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from meshc.ir import record, records, set_record, value_of
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Sharding, tile_sizes
from meshc.passes.partition.partition import Partitioner
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import Directive
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Instance, Token
from meshc.passes.place.factorize import factorize
from meshc.passes.place.propagate import Propagator
from meshc.plan.plan import Plan
from meshc.program.program import Port, Stage
from meshc.runtime.simulator.simulate import run_stage
from meshc.testing.brute_force import check_record
from meshc.testing.rank_tiles import assemble, tiles
from tests.broad import broad
from tests.graphs import trace
from tests.passes.place.test_factorize import LSTM, MIXTURE, fused_by_split, fused_by_view, lstm, mixture

ours = torch.ops.meshc
MESHES = (Mesh("a=2"), Mesh("a=3"), Mesh("a=4"), Mesh("a=2,b=2"), Mesh("a=3,b=2"))


class Choosy(Propagator):
    """Every axis takes any legal token, or none."""

    chance: random.Random

    def _choose(self, instance: Instance, told: Directive) -> dict[Token, tuple[str, ...]]:
        chosen: dict[Token, tuple[str, ...]] = {}
        for axis in self.axes:
            fits = [token for token in instance.size if self._fits(instance, token, chosen)]
            token = self.chance.choice([None, *fits, *fits])
            if token is not None:
                chosen[token] = (*chosen.get(token, ()), axis)
        return chosen


def anyhow(whole: Sharding, sizes: dict[str, int], chance: random.Random) -> Sharding:
    """The value split by any axes in any way."""
    places = [(dim, position) for dim, position, _ in whole.parts()]
    for axis in chance.sample(list(sizes), len(sizes)):
        place = chance.choice([None, *places])
        if place is not None:
            part = whole.dims[place[0]][place[1]]
            if tile_sizes(part.size, [sizes[other] for other in part.axes])[-1] > 1:
                whole = whole.with_axes(*place, (*part.axes, axis))
    return whole


def check(model: Callable[..., object], tensors: tuple[Tensor, ...], mesh: Mesh, seed: int) -> None:
    chance = random.Random(seed)
    sizes = {axis.name: axis.size for axis in mesh.axes}
    graph = trace(model, *tensors)
    _two_phases(graph, chance)
    factors = factorize(graph)
    names = FactorNames({factor: f"f{factor}" for factor in factors.size})
    placeholders = graph.find_nodes(op="placeholder")
    ports = [_port(node) for node in placeholders]
    propagator = Choosy(graph, factors, names, Plan("\n".join(f"{axis}: -" for axis in sizes)), sizes, ports)
    propagator.chance = chance
    assignment = propagator.assign_shardings()
    lies = [anyhow(assignment.whole((node, 0)), sizes, chance) for node in placeholders]
    ports = [replace(port, sharding=sharding) for port, sharding in zip(ports, lies, strict=True)]
    (output,) = graph.find_nodes(op="output")
    wants = [_leaves(assignment, value_of(node), sizes, chance) for node in output.args[0]]  # type: ignore[union-attr, arg-type]
    local = Partitioner(graph, assignment, ports, wants).build_graph()
    columns = [tiles(tensor, sharding, mesh) for tensor, sharding in zip(tensors, lies, strict=True)]
    rows = [[column[rank] for column in columns] for rank in range(mesh.world_size)]
    found = run_stage(Stage("main", local, (), ()), rows, mesh, sizes, observe=lambda node, seen: check_record(node, seen, mesh))
    expected = model(*tensors)
    for index, whole in enumerate(expected if isinstance(expected, list | tuple) else [expected]):
        got = assemble([row[index] for row in found], wants[index], mesh)
        torch.testing.assert_close(got, whole, rtol=1e-9, atol=1e-9, msg=lambda m, i=index: f"output {i} of seed {seed} on {mesh}: {m}")


def _two_phases(graph: Graph, chance: random.Random) -> None:
    """From some node on it is the backward phase, where nothing is left of what forward gathered."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for node in calls[chance.randrange(len(calls)) :]:
        found = tuple(replace(entry, phase="backward") for entry in records(node))
        set_record(node, found if isinstance(node.meta["meshc"], tuple) else found[0])


def _port(node: Node) -> Port:
    """Integers are free: they are known to every rank."""
    found = record(node)
    assert found.dtype is not None
    return Port("input" if found.dtype.is_floating_point else "buffer", node.name, found.shape, found.dtype)


def _leaves(assignment: Assignment, value: tuple[Node, int], sizes: dict[str, int], chance: random.Random) -> Sharding:
    given = assignment.given.get(value)
    return given if given is not None and chance.random() < 0.3 else anyhow(assignment.whole(value), sizes, chance)


# -------------------------------------------------------------------------------------------------------------------------- models


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def double(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)


def gradients(model: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The model's result and the gradient of its sum of squares by each floating operand."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]
        out = model(*leaves)
        wanted = [leaf for leaf in leaves if leaf.is_floating_point()]
        return out, *torch.autograd.grad((out * out).sum(), wanted)

    return run


def block(x: Tensor, up: Tensor, down: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    h = F.layer_norm(x, [x.shape[-1]], scale, shift)
    return x + F.linear(F.gelu(F.linear(h, up)), down)


def classifier(ids: Tensor, table: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """Embedding, a product, cross-entropy with an ignored label, tied head."""
    h = torch.tanh(F.linear(F.embedding(ids, table), w))
    logits = h @ table.t()
    picked = ours.take(torch.log_softmax(logits, -1), labels, -100)
    return -picked.sum() / (labels != -100).sum()


def three_projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(x @ q) * torch.sigmoid(x @ k) + torch.relu(x @ v)


def statistics(x: Tensor, w: Tensor) -> Tensor:
    """Batch norm by means, a maximum, a scan, a triangle."""
    h = x @ w
    normed = (h - h.mean(0)) * torch.rsqrt(h.var(0, correction=0) + 1e-5)
    return torch.tril(normed @ normed.t()).cumsum(1).amax(1) + torch.stack([h.sum(1), h.amin(1)]).mean(0)


def masks(x: Tensor, w: Tensor) -> Tensor:
    """Positions, a causal mask, halves: values that nobody sends."""
    position = torch.arange(x.shape[0])
    causal = position[:, None] >= position[None, :]
    scores = torch.where(causal, (x @ w) @ x.t(), torch.full((), -torch.inf, dtype=x.dtype))
    angle = position[:, None] * torch.arange(3)[None, :] * 0.1
    turned = torch.cat((-x[:, 3:], x[:, :3]), -1) * torch.cat((angle, angle), -1).cos()
    return torch.softmax(scores, -1) @ turned


LABELS = torch.tensor([[0, 3, -100, 2, 6], [5, -100, 1, 1, 4]])
MODELS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "mixture": (mixture, double(MIXTURE)),
    "lstm": (lstm, double(LSTM)),
    "lstm backward": (gradients(lstm), double(LSTM)),
    "fused by split": (gradients(fused_by_split), (f(2, 5, 16), f(72, 16), f(16, 24))),
    "fused by view": (gradients(fused_by_view), (f(2, 5, 16), f(72, 16), f(16, 24))),
    "block": (gradients(block), (f(3, 5, 6), f(10, 6), f(6, 10), f(6), f(6))),
    "classifier": (gradients(classifier), (LABELS.abs() % 7, f(7, 4), f(4, 4), LABELS)),
    "three projections": (gradients(three_projections), (f(5, 4), f(4, 6), f(4, 6), f(4, 6))),
    "statistics": (gradients(statistics), (f(5, 4), f(4, 6))),
    "masks": (gradients(masks), (f(5, 6), f(6, 6))),
}


@pytest.mark.parametrize("seeds", [range(3), broad(range(3, 8))], ids=lambda seeds: f"from {seeds.start}")
@pytest.mark.parametrize("name", [broad(name) if name in ("lstm backward", "fused by split") else name for name in MODELS])
def test_any_choice_gives_the_whole_result(name: str, seeds: range) -> None:
    for seed in seeds:
        check(*MODELS[name], MESHES[seed % len(MESHES)], seed)
