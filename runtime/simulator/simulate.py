"""Simulation of a stage on all ranks in one process, in lock step, without a process group: outputs of each rank, or the deadlock.

Each rank is a coroutine that stops at every collective. The scheduler lets ranks run until they stop, performs a collective when all
members of its group have arrived at it, and reports which rank waits for which when none can go on. Padding that a program does not claim
to be zero is filled with NaN, so that a missing mask shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
from torch.fx import Node

from meshc.check.guards import guard_function
from meshc.check.operators import error_at_line
from meshc.errors import CompileError, DeadlockError, MeshcError
from meshc.ir import Record, records, spmd
from meshc.ir.functions import Function, Keywords
from meshc.ir.graph import last_reads, values_freed_after
from meshc.ir.mesh import Mesh
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.sharding import Sharding, is_padded, local_size, tile_count, zigzag_halves
from meshc.ir.window import tile_bounds, tile_length, window_starts
from meshc.private import OpOverload
from meshc.program.program import Stage
from meshc.runtime.simulator.shared_memory import SharedMemory
from meshc.text.libraries import OWN


@dataclass(frozen=True)
class Meeting:
    """A rank's stop at a collective."""

    node: Node
    kind: str
    axes: tuple[str, ...]
    tensor: torch.Tensor
    rest: tuple[object, ...]

    def signature(self) -> tuple[object, ...]:
        rest = (str(one.tolist()) if isinstance(one, torch.Tensor) else one for one in self.rest)
        return (self.kind, self.axes, tuple(self.tensor.shape), self.tensor.dtype, *rest)

    def __str__(self) -> str:
        rest = "".join(f", {item!r}" for item in self.rest)
        return f"{self.kind}({self.node.args[0]}, {list(self.axes)}{rest}) of shape {list(self.tensor.shape)} at {self.node.name}"


@dataclass(frozen=True)
class Letter:
    """A message from one rank to another; the sender does not wait. `name`: the keys of its values."""

    sender: int
    receiver: int
    name: str
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LetterWait:
    """A rank's stop until a letter has arrived. Letters of one sender are read in the order in which they were posted."""

    receiver: int
    sender: int
    name: str

    def __str__(self) -> str:
        return f"recv({self.name}) from rank {self.sender}"


Observer = Callable[[Node, list[object]], None]
"""Called with a node and its values by rank, once all ranks have computed it."""
Stop = Meeting | Letter | LetterWait
Answer = torch.Tensor | tuple[torch.Tensor, ...] | None
"""The value with which a rank resumes: the result of a collective, the values of a letter, or None."""
Given = TypeVar("Given")
RankProgram = Generator[Stop, Answer, Given]


def run_stage(
    stage: Stage,
    inputs: Sequence[Sequence[torch.Tensor]],
    mesh: Mesh,
    sizes: Mapping[str, int],
    *,
    microbatch: int = 0,
    observe: Observer | None = None,
    poison: bool = True,
) -> list[list[torch.Tensor]]:
    """Outputs per rank of a stage, given its inputs per rank. Raises DeadlockError."""
    seen: dict[Node, dict[int, object]] = {}
    world = mesh.world_size

    def watch(rank: int) -> Callable[[Node, object], None] | None:
        if observe is None:
            return None

        def note(node: Node, value: object) -> None:
            row = seen.setdefault(node, {})
            row[rank] = value
            if len(row) == world:
                observe(node, [seen[node][r] for r in range(world)])
                del seen[node]

        return note

    ranks = [
        rank_program(stage, list(inputs[rank]), {**mesh.coordinates(rank), "mb": microbatch}, sizes, watch(rank), poison)
        for rank in range(world)
    ]
    return lock_step(ranks, mesh)


def lock_step(ranks: Sequence[RankProgram[Given]], mesh: Mesh) -> list[Given]:
    """Runs rank coroutines to their end: performs collectives once all members have arrived, delivers letters. Raises DeadlockError."""
    waiting: dict[int, Meeting | LetterWait] = {}
    results: dict[int, Given] = {}
    letters: dict[tuple[int, int], list[Letter]] = {}

    def advance(rank: int, value: Answer) -> None:
        try:
            while isinstance(stop := ranks[rank].send(value), Letter):
                letters.setdefault((stop.sender, stop.receiver), []).append(stop)
                value = None
            waiting[rank] = stop
        except StopIteration as stop:
            results[rank] = stop.value

    for rank in range(len(ranks)):
        advance(rank, None)
    while waiting:
        ready = next((found for rank, stop in waiting.items() if (found := _ready(mesh, rank, stop, waiting, letters))), None)
        if ready is None:
            raise DeadlockError(_deadlock_text(waiting, results, mesh))
        stops = [waiting.pop(member) for member in ready]
        first = stops[0]
        if isinstance(first, LetterWait):
            letter = letters[(first.sender, first.receiver)].pop(0)
            if letter.name != first.name:
                raise DeadlockError(f"messages do not match: rank {first.receiver} waits in {first}, where {letter.name} comes first")
            advance(ready[0], letter.values)
            continue
        meetings = [stop for stop in stops if isinstance(stop, Meeting)]
        for member, meeting in zip(ready, meetings, strict=True):
            if meeting.signature() != first.signature():
                raise DeadlockError(
                    f"collectives do not match: rank {ready[0]} is in {first}, rank {member} in {meeting}"
                )
        counts = [mesh.size(axis) for axis in first.axes]
        for member, value in zip(ready, perform(first, [m.tensor for m in meetings], counts), strict=True):
            advance(member, value)
    unread = [letter for posted in letters.values() for letter in posted]
    if unread:
        raise DeadlockError(f"{unread[0].name}, which rank {unread[0].sender} sends to rank {unread[0].receiver}, is never received")
    return [results[rank] for rank in range(len(ranks))]


def _ready(
    mesh: Mesh,
    rank: int,
    stop: Meeting | LetterWait,
    waiting: Mapping[int, Meeting | LetterWait],
    letters: Mapping[tuple[int, int], list[Letter]],
) -> list[int]:
    """The ranks that can go on together with this one; empty if it has to wait."""
    if isinstance(stop, LetterWait):
        return [rank] if letters.get((stop.sender, rank)) else []
    members = _group(mesh, rank, stop.axes)
    here = [waiting.get(member) for member in members]
    return members if all(isinstance(other, Meeting) and other.axes == stop.axes for other in here) else []


def _deadlock_text(waiting: Mapping[int, Meeting | LetterWait], results: Collection[int], mesh: Mesh) -> str:
    lines = ["ranks wait for each other for ever:"]
    for rank, stop in sorted(waiting.items()):
        others = [stop.sender] if isinstance(stop, LetterWait) else [m for m in _group(mesh, rank, stop.axes) if m != rank]
        lines.append(f"  rank {rank} waits in {stop} for ranks {others}")
    lines += [f"  rank {rank} has finished" for rank in sorted(results)]
    return "\n".join(lines)


def _group(mesh: Mesh, rank: int, axes: Sequence[str]) -> list[int]:
    """Ranks that differ from `rank` along `axes` only, row-major over the axes in the order given."""
    groups = [[dict(mesh.coordinates(rank))]]
    for axis in axes:
        groups.append([{**coordinates, axis: i} for coordinates in groups[-1] for i in range(mesh.size(axis))])
    return [mesh.rank(coordinates) for coordinates in groups[-1]]


def perform(meeting: Meeting, tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """The result of a collective for each member, in member order. `counts`: the sizes of its axes."""
    if meeting.kind not in _GIVES:
        raise DeadlockError(f"unknown collective {meeting.kind}")
    return _GIVES[meeting.kind](tensors, counts, *meeting.rest)


def _all_reduce(tensors: Sequence[torch.Tensor], counts: Sequence[int], how: str) -> list[torch.Tensor]:
    return [_reduce(tensors, how).clone() for _ in tensors]


def _broadcast(tensors: Sequence[torch.Tensor], counts: Sequence[int], index: int) -> list[torch.Tensor]:
    return [tensors[index].clone() for _ in tensors]


def _all_gather(tensors: Sequence[torch.Tensor], counts: Sequence[int], dim: int) -> list[torch.Tensor]:
    return [torch.cat(list(tensors), dim) for _ in tensors]


def _reduce_scatter(tensors: Sequence[torch.Tensor], counts: Sequence[int], dim: int, how: str) -> list[torch.Tensor]:
    return [tile.contiguous() for tile in _reduce(tensors, how).chunk(len(tensors), dim)]


def _all_to_all(tensors: Sequence[torch.Tensor], counts: Sequence[int], split: int, concat: int) -> list[torch.Tensor]:
    tiles = [tensor.chunk(len(tensors), split) for tensor in tensors]
    return [torch.cat([row[receiver] for row in tiles], concat) for receiver in range(len(tensors))]


def _ring_shift(tensors: Sequence[torch.Tensor], counts: Sequence[int], steps: int) -> list[torch.Tensor]:
    return [tensors[(place - steps) % len(tensors)].clone() for place in range(len(tensors))]


def _to_zigzag(tensors: Sequence[torch.Tensor], counts: Sequence[int], dim: int, back: bool = False) -> list[torch.Tensor]:
    tile, ranks = tensors[0].shape[dim], len(tensors)
    halves = [half for place in range(ranks) for half in zigzag_halves(tile * ranks, ranks, place)]
    order = torch.cat([torch.arange(start, start + length) for start, length in halves])
    return list(torch.cat(list(tensors), dim).index_select(dim, order.argsort() if back else order).split(tile, dim))


def _window_reach(window: Sequence[int], counts: Sequence[int], size: int) -> tuple[list[int], int, int]:
    """The starts of all windows, and how far these reach before the whole dim and after it."""
    starts = window_starts(window, counts)
    return starts, max(0, -min(starts)), max(0, max(starts) + window[3] - size)


def _halo(
    tiles: Sequence[torch.Tensor], counts: Sequence[int], dim: int, size: int, window: Sequence[int], fill: float
) -> list[torch.Tensor]:
    """Concatenates the whole dim, extended by as much as windows reach, and returns each rank's window of it."""
    real = [tile.narrow(dim, 0, count) for tile, (_, count) in zip(tiles, tile_bounds(size, counts), strict=True)]
    starts, before, after = _window_reach(window, counts, size)
    shape = list(tiles[0].shape)
    ends = [tiles[0].new_full([*shape[:dim], length, *shape[dim + 1 :]], fill) for length in (before, after)]
    whole = torch.cat([ends[0], *real, ends[1]], dim)
    return [whole.narrow(dim, start + before, window[3]).clone() for start in starts]


def _halo_sum(tensors: Sequence[torch.Tensor], counts: Sequence[int], dim: int, size: int, window: Sequence[int]) -> list[torch.Tensor]:
    """Adds up all windows in the whole dim, extended by as much as they reach, and returns each rank's tile, its padding zero."""
    starts, before, after = _window_reach(window, counts, size)
    shape = list(tensors[0].shape)
    shape[dim] = before + size + after
    whole = tensors[0].new_zeros(shape)
    for tensor, start in zip(tensors, starts, strict=True):
        whole.narrow(dim, start + before, window[3]).add_(tensor)
    shape[dim] = tile_length(size, counts)
    found = []
    for first, count in tile_bounds(size, counts):
        found.append(tensors[0].new_zeros(shape))
        found[-1].narrow(dim, 0, count).copy_(whole.narrow(dim, before + min(first, size), count))
    return found


def _rows_by_rank(choice: torch.Tensor, each: int, ranks: int) -> list[torch.Tensor]:
    """For each rank a mask of the rows with a choice among its `each` experts."""
    return [((choice >= rank * each) & (choice < (rank + 1) * each)).any(-1, keepdim=True) for rank in range(ranks)]


def _gather_rows(
    tensors: Sequence[torch.Tensor], counts: Sequence[int], choice: torch.Tensor, each: int, share: float
) -> list[torch.Tensor]:
    whole = torch.cat(list(tensors), -2)
    return [torch.where(here, whole, 0.0).unsqueeze(0) for here in _rows_by_rank(choice, each, len(tensors))]


def _scatter_rows(
    tensors: Sequence[torch.Tensor], counts: Sequence[int], choice: torch.Tensor, each: int, share: float
) -> list[torch.Tensor]:
    chosen = _rows_by_rank(choice, each, len(tensors))
    told = [torch.where(here, tensor[0], 0.0) for here, tensor in zip(chosen, tensors, strict=True)]
    return [tile.contiguous() for tile in _reduce(told, "sum").chunk(len(tensors), -2)]


_GIVES: dict[str, Callable[..., list[torch.Tensor]]] = {
    "all_reduce": _all_reduce, "broadcast": _broadcast, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "ring_shift": _ring_shift, "halo": _halo, "halo_sum": _halo_sum,
    "to_zigzag": _to_zigzag, "from_zigzag": partial(_to_zigzag, back=True), "gather_rows": _gather_rows, "scatter_rows": _scatter_rows,
}  # fmt: skip
"""By kind: function of the members' tensors, the sizes of the axes, and the collective's other arguments."""


def _reduce(tensors: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = REDUCTIONS[how].combine(total, tensor)
    return total


def rank_program(
    stage: Stage,
    inputs: list[torch.Tensor],
    coordinates: Mapping[str, int],
    sizes: Mapping[str, int],
    note: Callable[[Node, object], None] | None,
    poison: bool,
) -> RankProgram[list[torch.Tensor]]:
    """One rank's run of a stage, which stops at every collective. Returns the stage's outputs."""
    env: dict[Node, object] = {}
    dead = values_freed_after(last_reads(stage.graph.nodes))
    memory = SharedMemory(stage.graph) if note is None else None  # observed values must not be overwritten

    def value(argument: object) -> object:
        if isinstance(argument, Node):
            return env[argument]
        if isinstance(argument, list | tuple):
            return [value(item) for item in argument]
        return argument

    placeholders = iter(inputs)
    for node in stage.graph.nodes:
        if node.op == "output":
            if memory is not None:
                memory.leave()
            return cast(list[torch.Tensor], [value(item) for item in node.args[0]])  # results are single tensors here
        result: object
        if node.op == "placeholder":
            result = next(placeholders)
        elif node.target is spmd.coordinate:
            result = coordinates[node.args[0]]
        elif spmd.is_collective(node.target):
            operand = env[node.args[0]]
            assert isinstance(operand, torch.Tensor)
            result = yield Meeting(node, node.target.__name__, tuple(node.args[1]), operand, tuple(value(rest) for rest in node.args[2:]))
        else:
            result = _call_operator(stage, node, [value(a) for a in node.args], {k: value(a) for k, a in node.kwargs.items()})
            if isinstance(node.target, OpOverload) and node.target.namespace not in OWN:
                _refuse_false_fake(node, result)
        if poison:
            result = _poison(node, result, coordinates, sizes)
        if memory is not None:
            result = memory.place(node, result, env)
        env[node] = result
        if note is not None:
            note(node, result)
        for value_read in dead.get(node, ()):
            del env[value_read]
    raise AssertionError("a stage ends in an output")


def _call_operator(stage: Stage, node: Node, args: Sequence[object], kwargs: Keywords) -> object:
    """The result of an operator; in a stage that was read from a text, its guard runs first, and errors name the line."""
    target: Function = node.target  # type: ignore[assignment]  # a stage has calls of functions alone
    if stage.origin is None:
        return target(*args, **kwargs)
    try:
        return guard_function(target, target)(*args, **kwargs)
    except MeshcError:
        raise
    except Exception as error:
        raise error_at_line(stage.origin, node.name, error) from error


def _refuse_false_fake(node: Node, result: object) -> None:
    """Raises CompileError if an operator of a user's library returns another shape or dtype than its fake, for which the program was
    compiled."""
    several = result if isinstance(result, list | tuple) else (result,)
    made = [one for one in several if isinstance(one, torch.Tensor)]
    told = [one for one in records(node) if one.dtype is not None]
    for number, (tensor, one) in enumerate(zip(made, told, strict=False)):
        if tuple(tensor.shape) != tuple(one.shape) or tensor.dtype != one.dtype:
            which = f"result {number} of " if len(made) > 1 else ""
            where = f" at {one.source}" if str(one.source) else ""
            raise CompileError(
                f"{which}{str(node.target).removesuffix('.default')}{where} is {_type_text(tensor.dtype, tensor.shape)} on a rank, "
                f"and its fake says {_type_text(one.dtype, one.shape)}\n  what to do: put the fake right (register_fake), or the operator"
            )


def _type_text(dtype: torch.dtype | None, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"


def _poison(node: Node, value: object, coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> object:
    """`value` with NaN in all padding that is not claimed to be zero."""
    found = node.meta.get("meshc")
    if not isinstance(found, Record) or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    sharding = None if found.used is not None else found.sharding  # used rows have no padding
    return value if sharding is None else fill_padding(value, sharding, coordinates, sizes)


def fill_padding(value: torch.Tensor, sharding: Sharding, coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> torch.Tensor:
    """A copy with NaN in the padding of every part not known to be zero; the value itself if it has none."""
    parts = list(sharding.parts())
    for position, (dim, place, part) in enumerate(parts):
        if not is_padded(part, sizes) or (dim, place) in sharding.zero:
            continue
        count = tile_count(part.size, [sizes[a] for a in part.axes], [coordinates[a] for a in part.axes])
        local = local_size(part, sizes)
        if count == local:
            continue
        shape = [local_size(other, sizes) for _, _, other in parts]
        real = torch.arange(local) < count
        view = [1] * len(shape)
        view[position] = local
        value = torch.where(real.view(view), value.reshape(shape), float("nan")).reshape(value.shape)
    return value
