"""Predicted bytes and rows of expert dispatch, for a given imbalance: the load of the busiest rank over the mean.

    rows(i)    i T k / n, at most the capacity               choices of that rank's experts
    share(i)   1 - C(E - i E/n, k) / C(E, k)                 of tokens with an expert there; C(x, k) = x (x - 1) .. (x - k + 1) / k!
    bytes(i)   (n - 1) / n T h b share(i) for each exchange of rows; (n - 1) / n T h b for one that sends all tokens

E experts are split over n ranks, along which T tokens choose k experts each; h is the width of a token (h + k if weights go with a row), b
the bytes of an element. Rows and share are computed as if the rank had i times as many experts, all equally likely. The figures are read
off a program's own graphs. If the ranks are on several nodes, with m of them in each:

                        within nodes                        between nodes
    at once             (m - 1) / n T h b share(E/n)        (n - m) / n T h b share(E/n)
    in two hops         (m - 1) / m T h b share(E/n)        (n/m - 1) / n T h b share(E m/n)

share(x) = 1 - C(E - x, k) / C(E, k): the share of tokens that choose one of x experts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Final, cast

import torch
from torch.fx import Node

from meshc.cost.devices import Device, devices_of
from meshc.cost.links import fewest_together, payload, rows_by_link
from meshc.cost.peak_memory import runs
from meshc.ir import is_getitem, record, spmd
from meshc.ops import bounded_groups as _bounded_groups  # noqa: F401 - registers meshc::to_places
from meshc.ops import expert_groups as _groups  # noqa: F401 - registers meshc::to_groups
from meshc.ops import expert_slots as _slots  # noqa: F401 - registers meshc::choices_to_slots
from meshc.ops import used_rows as _used_rows  # noqa: F401 - registers meshc::rows_of_tokens
from meshc.program.program import PlainProgram

aten, meshc = torch.ops.aten, torch.ops.meshc

USED: Final = meshc.rows_of_tokens.default
HANDED: Final = (meshc.to_groups.default, meshc.in_slots.default, meshc.to_places.default, meshc.in_places.default, USED)
BROUGHT: Final = (
    meshc.from_groups.default, meshc.over_slots.default, meshc.from_places.default, meshc.over_places.default, meshc.tokens_of_rows.default,
)  # fmt: skip
PRODUCTS: Final = (meshc.group_mm.default, meshc.used_mm.default)
CHOICES: Final = (meshc.group_choices.default, meshc.bounded_choices.default)


@dataclass(frozen=True)
class Traffic:
    """Dispatch and combine traffic of one layer's experts, in one call.

    path     path of the experts' module
    tokens   tokens whose choices a rank knows: those along the axes that split the experts
    places   capacity of a rank, in rows
    whole    bytes that a rank receives or sends in exchanges of all tokens
    read     (ranks that a row is sent for, bytes) of exchanges of chosen rows, if all experts are equally likely
    times    runs of the layer in a call (one per microbatch)
    together ranks along these axes in each node, if they span several nodes; 0 if they are in one
    row      bytes of a token in all exchanges of rows of a call, both ways
    links    bytes of chosen rows (within nodes, between nodes), by the exchanges of the program
    by_node  whether rows go in two hops
    """

    path: str
    experts: int
    chosen: int
    ranks: int
    tokens: int
    places: int
    whole: float = 0.0
    read: tuple[tuple[int, float], ...] = ()
    times: int = 1
    together: int = 0
    row: float = 0.0
    links: tuple[float, float] = (0.0, 0.0)
    by_node: bool = False

    @property
    def most(self) -> float:
        """The largest possible imbalance: as many choices of each token as possible fall on one rank."""
        here = min(self.chosen, ceil(self.experts / self.ranks))
        return here * self.ranks / self.chosen

    def rows(self, imbalance: float) -> int:
        """Rows that the busiest rank computes in a call."""
        return self.times * min(self.places, round(imbalance * self.tokens * self.chosen / self.ranks))

    def share(self, imbalance: float, ranks: int = 1) -> float:
        """The share of tokens with an expert on the busiest rank; with `ranks`, on any of that many equally busy ranks."""
        others = self.experts - imbalance * ranks * self.experts / self.ranks
        return 1.0 - prod(max(0.0, others - nth) / (self.experts - nth) for nth in range(self.chosen))

    def bytes(self, imbalance: float) -> int:
        """Bytes that the busiest rank receives and sends back, in all phases of a call."""
        read = sum(size * self.share(imbalance, ranks) / self.share(1.0, ranks) for ranks, size in self.read)
        return round(self.whole + read)

    def by_formula(self, by_node: bool) -> tuple[float, float]:
        """Bytes of chosen rows (within nodes, between nodes) that a rank receives and sends back, in two hops (`by_node`) or at once."""
        n, m = self.ranks, self.together
        tokens = self.tokens * self.row
        if by_node:
            return (m - 1) / m * tokens * self.share(1.0), (n // m - 1) / n * tokens * self.share(1.0, m)
        return (m - 1) / n * tokens * self.share(1.0), (n - m) / n * tokens * self.share(1.0)


@dataclass
class _Layer:
    """Traffic of one layer while its exchanges are counted."""

    made: Traffic | None = None
    whole: float = 0.0
    read: Counter[int] = field(default_factory=Counter)
    links: list[float] = field(default_factory=lambda: [0.0, 0.0])
    row: float = 0.0
    by_node: bool = False

    def to_traffic(self) -> Traffic:
        assert self.made is not None
        read = tuple((ranks, self.read[ranks]) for ranks in sorted(self.read))
        near, far = self.links
        return replace(self.made, whole=self.whole, read=read, row=self.row, links=(near, far), by_node=self.by_node)


def traffic(program: PlainProgram) -> list[Traffic]:
    """Traffic of each layer whose experts are split, in the program's order."""
    layers: dict[str, _Layer] = {}
    often, device = runs(program), devices_of(program.mesh).slowest()
    for stage in program.stages.values():
        nodes = list(stage.graph.nodes)
        experts = _experts(nodes)
        for node in nodes:
            if node.target not in HANDED and node.target not in BROUGHT:
                continue
            path = record(node).source.module
            layer = layers.setdefault(path, _Layer())
            if layer.made is None and path in experts:
                layer.made = _layer_traffic(program, node, path, experts[path], often[stage.name], device)
            if record(node).shape[-1] != 1:  # weights, one per choice, are not exchanged by rows
                _count(program, layer, node, often[stage.name], device)
    found = [layer.to_traffic() for layer in layers.values() if layer.made is not None]
    return [one for one in found if one.ranks > 1]


def _experts(nodes: list[Node]) -> dict[str, int]:
    """Number of experts, by the path of their module."""
    found: dict[str, int] = {}
    for node in nodes:
        if node.target in PRODUCTS and isinstance(node.args[1], Node):
            lies = record(node.args[1]).sharding
            found[record(node).source.module] = record(node.args[1]).shape[0] if lies is None else lies.shape[0]
    by_slot = [node for node in nodes if node.target is meshc.choices_to_slots.default]  # there is a matrix per place then, some for copies
    return {**found, **{record(node).source.module: record(node.args[1]).shape[0] for node in by_slot}}  # type: ignore[arg-type]


def _layer_traffic(program: PlainProgram, node: Node, path: str, experts: int, times: int, device: Device) -> Traffic | None:
    """A layer's traffic without its bytes, from the choices of a rank's groups; None if those are computed in another stage."""
    said = _own_of(node.args[1]) if node.target is USED else node.args[1]
    made = said.args[0] if isinstance(said, Node) and is_getitem(said) else None
    if not isinstance(made, Node) or made.target not in CHOICES or not isinstance(said, Node) or not isinstance(made.args[0], Node):
        return None
    choice, lies = record(made.args[0]).shape, record(said).sharding
    axes = () if lies is None else tuple(axis for part in lies.dims[0] for axis in part.axes)
    ranks, places = prod(program.axis_sizes[axis] for axis in axes), prod(record(said).shape)
    together = fewest_together(program.mesh, axes, device.ranks_per_node)
    return Traffic(path, experts, choice[-1], ranks, prod(choice[:-1]), places, times=times, together=together)


def _own_of(used: object) -> object:
    """The choices of a group's experts from which the `used` places are computed."""
    assert isinstance(used, Node) and is_getitem(used)
    return used.all_input_nodes[0].args[0]


def _count(program: PlainProgram, layer: _Layer, node: Node, times: int, device: Device) -> None:
    """Adds the exchange, with all its hops, that dispatches tokens to `node` or combines its results."""
    found = _through(node.args[0]) if node.target in HANDED else _only_reader(node)
    size = payload(found, program.axis_sizes) if spmd.is_collective(found.target) else 0
    if found.target in spmd.OF_ROWS:
        made = record(found)
        layer.row += times * made.shape[-1] * made.dtype.itemsize  # type: ignore[union-attr]
        hops = [found]
        while (hop := _through(hops[-1].args[0]) if node.target in HANDED else _only_reader(hops[-1])).target in spmd.OF_ROWS:
            if hop is hops[-1]:  # its result is separated into rows and weights
                break
            hops.append(hop)
        least = min(cast(int, hop.args[3]) for hop in hops)
        for hop in hops:
            layer.read[cast(int, hop.args[3]) // least] += times * payload(hop, program.axis_sizes)
            for link, moved in enumerate(rows_by_link(hop, program.mesh, device)):
                layer.links[link] += times * moved
        layer.by_node |= len(hops) > 1
    elif found.target in (spmd.all_gather, spmd.reduce_scatter):
        ranks = prod(program.axis_sizes[axis] for axis in found.args[1])  # type: ignore[union-attr, misc, index]
        layer.whole += times * size * (ranks - 1) / ranks


SHAPED: Final = (aten.reshape.default, aten.slice.Tensor, aten.cat.default)
"""Operators between rows and their exchange: they change the shape, or add the rows' weights (`passes/lower/dispatch_and_combine.py`)."""


def _through(x: object) -> Node:
    assert isinstance(x, Node)
    while x.target in SHAPED and x.all_input_nodes:
        x = x.all_input_nodes[0]
    return x


def _only_reader(x: Node) -> Node:
    while len(x.users) == 1:
        (reader,) = x.users
        if reader.target not in SHAPED:
            return reader
        x = reader
    return x
