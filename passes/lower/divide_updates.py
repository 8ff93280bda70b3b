"""Divide updates: the computations of an optimizer on whole matrices, each on one rank instead of on all.

    every rank: chain(a0), chain(a1), chain(a2), chain(a3)     becomes     rank r: chain(a_r), and its result to all ranks that keep a tile

Newton-Schulz products (Muon), roots of second moments (Shampoo), bases of them (SOAP) need whole matrices, and every rank computes the
same (`whole_chains.py`). Equal chains, as equal layers have them, are grouped, as many as there are ranks, and each rank computes one
(`distribute_chains.py`): over all axes of the mesh if there are enough chains, over fewer axes if not, or with idle ranks. The added
messages and copies are weighed, by the device's cost model, against the arithmetic saved; where they take longer, nothing changes.
Whole matrices are distributed like this in github.com/KellerJordan/Muon, tiles exchanged like this in github.com/microsoft/dion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod

from torch.fx import Graph, Node

from meshc.cost.devices import Device, devices_of
from meshc.cost.links import payload
from meshc.cost.stage_clock import node_seconds
from meshc.ir import spmd
from meshc.ir.mesh import Mesh, axis_sizes, role
from meshc.passes.lower.distribute_chains import ChainGroup, DividedChains
from meshc.passes.lower.whole_chains import Chain, chains
from meshc.passes.phases.lowered_program import LoweredProgram


@dataclass
class Shares:
    """Counts of one stage. `chains`: their number; `divided`: the number of divided ones; `over`: by axes, the FLOPs of chains divided over
    them; `flops`: of a rank for all chains, before and after; `sent`: bytes that a rank sends for divided chains, before and after."""

    chains: int = 0
    divided: int = 0
    over: dict[tuple[str, ...], float] = field(default_factory=dict)
    flops: tuple[float, float] = (0.0, 0.0)
    sent: tuple[int, int] = (0, 0)


def divide_updates(lowered: LoweredProgram) -> LoweredProgram:
    """Divides each stage's updates in place, and adds a note on the savings."""
    device = devices_of(lowered.mesh).slowest()
    if not _axes(lowered.mesh):
        return lowered
    found = [divide(stage.graph, lowered.mesh, device) for stage in lowered.stages.values()]
    found = [one for one in found if one.chains]
    total = sum(one.flops[0] for one in found)
    parts: dict[tuple[str, ...], float] = {}
    for one in found:
        for axes, count in one.over.items():
            parts[axes] = parts.get(axes, 0.0) + count / total
    return replace(lowered, divided=parts).with_notes(*_notes(found))


def divide(graph: Graph, mesh: Mesh, device: Device) -> Shares:
    """Divides the updates of one graph, in place."""
    alike: dict[object, list[Chain]] = {}
    for chain in chains(graph):
        alike.setdefault(chain.key, []).append(chain)
    division = _Division(graph, mesh, device)
    for members in alike.values():
        division.share(members)
    return division.made


def _axes(mesh: Mesh) -> list[str]:
    """Axes along which all ranks run the same graph."""
    return [axis.name for axis in mesh.axes if axis.size > 1 and role(axis.name) != "pp"]


class _Division:
    def __init__(self, graph: Graph, mesh: Mesh, device: Device) -> None:
        self.graph, self.mesh, self.device = graph, mesh, device
        self.sizes = axis_sizes(mesh)
        self.made = Shares()

    def share(self, members: Sequence[Chain]) -> None:
        """Divides equal chains, as many at a time as pays."""
        each = members[0].flops
        was, now = self.made.flops
        self.made.chains += len(members)
        rest, turns, refused = list(members), 0, set[tuple[tuple[str, ...], int]]()
        while len(rest) > 1:
            for axes in self._over(members[0].axes, len(rest)):
                group = rest[: self._ranks(axes)]
                if (axes, len(group)) not in refused and self._try_to_divide(group, axes):
                    rest, turns = rest[len(group) :], turns + 1
                    break
                refused.add((axes, len(group)))
            else:
                break
        self.made.flops = was + each * len(members), now + each * (len(rest) + turns)

    def _over(self, split: Iterable[str], count: int) -> list[tuple[str, ...]]:
        """Axes over which `count` chains may be divided, whose values are split over `split`, best first: the most ranks that all get a
        chain, then the fewest of which some are idle."""
        own, others = set(split), [axis for axis in _axes(self.mesh) if axis not in set(split)]
        sets = [own.union(more) for several in range(len(others) + 1) for more in combinations(others, several)]
        found = [tuple(axis for axis in _axes(self.mesh) if axis in one) for one in sets]
        ranks = {axes: self._ranks(axes) for axes in found if self._ranks(axes) > 1}
        return sorted(ranks, key=lambda axes: (ranks[axes] > count, ranks[axes] if ranks[axes] > count else -ranks[axes]))

    def _ranks(self, axes: Iterable[str]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def _try_to_divide(self, members: Sequence[Chain], axes: tuple[str, ...]) -> bool:
        """Divides these chains, if that is possible and faster; whether it was done."""
        group = ChainGroup(self.graph, members, axes, self.sizes)
        if not group.can_divide():
            return False
        made, spared = group.write(), [node for chain in members for node in chain.spared_nodes]
        if self._seconds(made.nodes) >= self._seconds(spared):
            group.drop(made)
            return False
        self._note(members, axes, made, spared)
        group.replace_chains(made)
        return True

    def _note(self, members: Sequence[Chain], axes: tuple[str, ...], made: DividedChains, spared: Iterable[Node]) -> None:
        self.made.divided += len(members)
        self.made.over[axes] = self.made.over.get(axes, 0.0) + members[0].flops * len(members)
        was, now = self.made.sent
        self.made.sent = was + sum(self._collective_bytes(spared)), now + sum(self._collective_bytes(made.nodes))

    def _seconds(self, nodes: Iterable[Node]) -> float:
        return sum(node_seconds(node, self.mesh, self.device) for node in nodes)

    def _collective_bytes(self, nodes: Iterable[Node]) -> Iterator[int]:
        """Bytes that a rank sends, by collective."""
        for node in nodes:
            if spmd.is_collective(node.target):
                ranks = self._ranks(node.args[1])  # type: ignore[arg-type]
                yield payload(node, self.sizes) * (ranks - 1) // ranks


def _notes(found: Sequence[Shares]) -> Iterator[str]:
    if not found:
        return
    count, divided = sum(one.chains for one in found), sum(one.divided for one in found)
    most = max(found, key=lambda one: one.flops)
    was, now = (f"{flops / 1e9:,.3g}" for flops in most.flops)
    if not divided:
        yield f"updates of whole matrices: every rank computes all {count}, {was} GFLOP a step: " + (
            "there is but one" if count == 1 else "no two are alike, or to divide them would take longer"
        )
        return
    over = ", ".join(dict.fromkeys(axis for one in found for axes in one.over for axis in axes))
    sent = [max(one.sent[place] for one in found) for place in (0, 1)]
    rest = f", the other {count - divided} by every rank" if divided < count else ""
    yield (
        f"updates of whole matrices: {divided} of {count} computations are divided over the ranks of {over}{rest}: a rank computes {now} "
        f"GFLOP a step in place of {was}, and sends {sent[1]:,} bytes for those that are divided in place of {sent[0]:,}"
    )
