"""Shape: how many stages a program is cut into, where, on which ranks, and under which schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

from torch.fx import Node

from meshc.cost.devices import Device, for_mesh
from meshc.cost.links import collective_seconds, send_seconds
from meshc.cost.operators import seconds
from meshc.errors import CompileError, PlanError
from meshc.ir import has_record, is_getitem, local_bytes, records
from meshc.passes import schedules
from meshc.passes.draft import Draft
from meshc.passes.schedules.kind import Kind
from meshc.passes.stages.balance import Place, best_cuts
from meshc.passes.stages.homes import Kinds
from meshc.pipelining.cut import STAGE_NAMES
from meshc.pipelining.schedule import Link, Schedule, connect, parse
from meshc.pipelining.timing import Costs
from meshc.spmd import is_collective

MOST_PLACES = 400
"""Cuts are looked for at so many places at most: where least would be sent."""


@dataclass(frozen=True)
class Shape:
    """
    cuts   positions among the forward half's operators
    ranks  of each stage
    kind   the schedule's, or the schedule itself as the user wrote it
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    kind: Kind | str
    microbatches: int
    trains: bool

    @cached_property
    def graphs(self) -> frozenset[tuple[str, int]]:
        """What the schedule runs: (forward, backward, input or weight, stage)."""
        return frozenset((STAGE_NAMES[item.op], item.stage) for items in self.schedule(()).actions for item in items)

    def schedule(self, links: Collection[Link], costs: Costs | None = None) -> Schedule:
        """Each rank's list, with the messages that the links ask for."""
        if isinstance(self.kind, str):
            return parse(self.kind, links)
        ranks = max(self.ranks) + 1
        lists = self.kind.lists(ranks, len(self.ranks), self.microbatches, costs)
        return connect(lists, links, self.kind.name)


def shape_of(draft: Draft, found: Kinds, numbers: Mapping[Node, int]) -> Shape:
    """What the user asked for, or the default: 1F1B over stages of equal time."""
    axis = draft.mesh.pipeline_axis
    assert axis is not None
    trains = bool(found.backward)
    count = draft.request.microbatches
    kind = _kind(draft, trains)
    if isinstance(kind, str):
        written = parse(kind, ())
        stages = written.stages
        ranks = tuple(written.rank_of(stage) for stage in range(stages))
        if written.ranks != axis.size or written.microbatches != count:
            raise PlanError(
                f"the schedule is for {written.ranks} ranks and {written.microbatches} microbatches, "
                f"the program for {axis} and {count}: give each rank a line, and each microbatch its actions"
            )
    else:
        stages = len(draft.request.pp_splits) + 1 if draft.request.pp_splits else kind.stages(axis.size)
        kind.refuse(axis.size, stages, count)
        owner = {item.stage: rank for rank, items in enumerate(kind.lists(axis.size, stages, count, None)) for item in items}
        ranks = tuple(owner[stage] for stage in range(stages))
    cuts = _named_cuts(draft, found) if draft.request.pp_splits else _balanced_cuts(draft, found, numbers, stages)
    if len(cuts) != stages - 1:
        raise PlanError(f"{len(cuts)} cuts make {len(cuts) + 1} stages, but the schedule wants {stages}: name {stages - 1} modules in pp_splits")
    return Shape(cuts, ranks, kind, count, trains)


def _kind(draft: Draft, trains: bool) -> Kind | str:
    """A schedule by name, or the text that the user wrote."""
    asked = draft.request.schedule
    if asked is None:
        return schedules.get("1f1b" if trains else "inference")
    if ":" in asked:
        return asked
    kind = schedules.get(asked)
    if kind.trains != trains:
        fitting = [name for name in schedules.names() if schedules.get(name).trains == trains]
        what = "a training step" if trains else "an inference"
        raise PlanError(f"the schedule {asked} is not one of {what}: use {', '.join(fitting)}")
    return kind


def _named_cuts(draft: Draft, found: Kinds) -> tuple[int, ...]:
    """Stages begin where the first operator of each named module stands."""
    modules = [records(node)[0].source.module for node in found.forward]
    cuts = []
    for name in draft.request.pp_splits:
        first = next((i for i, module in enumerate(modules) if _inside(module, name)), None)
        if first is None:
            known = ", ".join(dict.fromkeys(module for module in modules if module and module.count(".") <= name.count(".")))
            raise PlanError(f"pp_splits: no operator of the model is in a module {name!r}; there are {known}")
        cuts.append(first)
    if cuts != sorted(set(cuts)) or 0 in cuts:
        raise PlanError(f"pp_splits: {list(draft.request.pp_splits)} must be modules in the order in which they run, the first one left out")
    return tuple(cuts)


def _inside(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".") or fnmatchcase(module, name)


def _balanced_cuts(draft: Draft, found: Kinds, numbers: Mapping[Node, int], stages: int) -> tuple[int, ...]:
    places, end = places_of(draft, found, numbers)
    best = best_cuts(places, end, stages)
    if best is None:
        raise CompileError(
            f"the model has {len(places)} places to cut it, which is too few for {stages} stages\n"
            "  what to do: fewer ranks on the pipeline axis, or a schedule with fewer stages a rank"
        )
    return tuple(best[0])


def places_of(draft: Draft, found: Kinds, numbers: Mapping[Node, int]) -> tuple[list[Place], Place]:
    """Where the forward half can be cut, with what stands before each place, and the end."""
    device = for_mesh(draft.mesh)
    order = found.forward
    position = {node: i for i, node in enumerate(order)}
    taken = [_seconds(node, draft, device) for node in order]
    last_of = {numbers[node]: i for node, i in position.items() if node in numbers}
    known = sorted(last_of)
    for node in found.backward:
        place = bisect_right(known, numbers.get(node, known[-1])) - 1
        taken[last_of[known[max(place, 0)]]] += _seconds(node, draft, device)
    before = [0.0, *accumulate(taken)]
    crossing = _crossing(order, position)
    link = device.links[0]
    factor = 2 if found.backward else 1
    places = [
        Place(i, before[i], factor * send_seconds(crossing[i], link)) for i in range(1, len(order)) if not is_getitem(order[i])
    ]
    if len(places) > MOST_PLACES:
        least = sorted(places, key=lambda place: (place.send_s, place.position))[:MOST_PLACES]
        places = sorted(least, key=lambda place: place.position)
    return places, Place(len(order), before[len(order)])


def _crossing(order: Sequence[Node], position: Mapping[Node, int]) -> list[int]:
    """Bytes that a cut before each position would send forward: values made before it that something behind it reads."""
    change = [0] * (len(order) + 2)
    for i, node in enumerate(order):
        size = sum(map(local_bytes, records(node))) if has_record(node) else 0
        readers = [position[user] for user in node.users if user in position]
        if readers and size and max(readers) > i:
            change[i + 1] += size
            change[max(readers) + 1] -= size
    return list(accumulate(change))


def _seconds(node: Node, draft: Draft, device: Device) -> float:
    return collective_seconds(node, draft.mesh, device) if is_collective(node.target) else seconds(node, device)

