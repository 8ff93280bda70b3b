"""Outputs of an inference in microbatches: each microbatch's rows, concatenated after the last one.

    each:   y = f(rows k of x)          leaves as rows:y
    after:  all rows, concatenated in the order of microbatches; padding of the last one is cut off
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.errors import CompileError
from meshc.ir import record, set_record, spmd
from meshc.ir.functions import Function
from meshc.ir.graph import call, placeholders
from meshc.ir.keys import is_a
from meshc.ir.sharding import Part, Sharding, local_size
from meshc.ir.spmd import MICROBATCH
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.program import Port, Stage

aten = torch.ops.aten


def outputs_by_rows(lowered: LoweredProgram, stage: Stage) -> dict[str, Node]:
    """Outputs of which a microbatch computes some rows, by key. Raises CompileError if these are not contiguous rows of dim 0."""
    nodes = stage.results()
    found = {}
    for port in lowered.outputs:
        place = _place(port.sharding)
        if place is None or port.sharding is None:
            continue
        dim, position = place
        part = port.sharding.dims[dim][position]
        stays = lowered.request.inputs == "local" and len(part.axes) > 1
        if position or dim or part.axes[-1] != MICROBATCH or (stays and part.size % prod(lowered.sizes[axis] for axis in part.axes)):
            raise CompileError(
                f"{port.name}: the rows of a microbatch do not lie together in this output, {part}\n"
                "  what to do: microbatches=1, or a batch that the ranks and the microbatches divide"
            )
        found[port.key] = nodes[port.key]
    return found


def whole_rows(lowered: LoweredProgram, after: Stage) -> tuple[Port, ...]:
    """Changes `after` so that placeholders with keys `joined:` have the rows of all microbatches, gathered over ranks and without padding.
    Returns the ports of the outputs."""
    count = lowered.sizes[MICROBATCH]
    graph = after.graph
    for node, key in after.keys().items():
        if not is_a(key, "joined"):
            continue
        made = record(node)
        assert made.sharding is not None
        part = made.sharding.dims[0][0]
        axes = [axis for axis in part.axes if axis != MICROBATCH]
        set_record(node, replace(made, shape=(made.shape[0] * count, *made.shape[1:]), sharding=None))
        rows = _OutputRows(graph, node, partial(_rows, part, lowered.sizes))
        rows.cut_padding(axes)
        while axes and lowered.request.inputs != "local":
            rows.gather(axes.pop(), lowered.sizes)
            rows.cut_padding(axes)
        if rows.made:
            node.replace_all_uses_with(rows.last, delete_user_cb=rows.is_other)
    local = lowered.request.inputs == "local"
    return tuple(port if port.sharding is None else replace(port, sharding=_without(port.sharding, local)) for port in lowered.outputs)


def _rows(part: Part, sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    return local_size(replace(part, axes=tuple(axes)), sizes)


class _OutputRows:
    """Emits the rows of an output: gathered axis by axis, each time without the padding. `size(axes)`: rows of a tile split by `axes`."""

    def __init__(self, graph: Graph, node: Node, size: Callable[[Sequence[str]], int]) -> None:
        self.graph, self.last, self.size = graph, node, size
        self.place = placeholders(graph)[-1]
        self.made: list[Node] = []

    def cut_padding(self, axes: Sequence[str]) -> None:
        if record(self.last).shape[0] != self.size(axes):
            self._emit(self.size(axes), aten.slice.Tensor, 0, 0, self.size(axes))

    def gather(self, axis: str, sizes: Mapping[str, int]) -> None:
        self._emit(record(self.last).shape[0] * sizes[axis], spmd.all_gather, [axis], 0)

    def is_other(self, user: Node) -> bool:
        return user not in self.made

    def _emit(self, rows: int, target: Function, *args: Argument) -> None:
        like = record(self.last)
        with self.graph.inserting_after(self.place):
            made = replace(like, shape=(rows, *like.shape[1:]), reason="the rows of all microbatches")
            self.place = call(self.graph, made, target, self.last, *args)
        self.last = self.place
        self.made.append(self.place)


def _place(sharding: Sharding | None) -> tuple[int, int] | None:
    """Dim and position of the part that microbatches split; None if there is none."""
    parts = sharding.parts() if sharding is not None else ()
    return next(((dim, position) for dim, position, part in parts if MICROBATCH in part.axes), None)


def _without(sharding: Sharding, local: bool) -> Sharding:
    """The sharding in which an output leaves: whole, or with `local` this rank's part of the batch."""
    place = _place(sharding)
    if place is None:
        return sharding
    axes = sharding.dims[place[0]][place[1]].axes
    return sharding.with_axes(*place, tuple(axis for axis in axes if local and axis != MICROBATCH))
