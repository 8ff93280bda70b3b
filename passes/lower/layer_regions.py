"""Partition of a compiled region by layer, so that a backend compiles one of several equal layers.

    with region(0):  embedding, layers.0, ..., layers.31, head          one function of 32 layers: compiled for minutes
    with region(0):  embedding, layers.0
    with region(1):  layers.1                                           equal to regions 2 to 30: compiled once
    ...

A layer is an item of a list of modules of which MANY or more are in the region; forward, backward and update are counted separately. An
operator of an update has no module of its own and takes that of the gradient that it reads (clipping multiplies each). Other operators
without a module stay with the operator before them; the results of a call stay together. Little fusion is lost between two layers: the
residual sum of one with the norm of the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from torch.fx import Node

from meshc.ir import has_record, is_getitem, records

MANY: Final = 8
"""Layers of one list from which a region is cut. Fewer compile as fast, and run a little faster, as one region."""

BACK: Final = 2
"""Pieces per layer, at most: where layers are interleaved more than that, the region is not cut."""


def layer_parts(nodes: Sequence[Node]) -> list[int]:
    """The part number of each node of a region, in order; 0 for all where the region is not cut."""
    places = [(records(node)[0].phase, tuple(_items(_module(node)))) for node in nodes]
    numbers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for phase, items in places:
        for path, number in items:
            numbers[phase, path].add(number)
    labels = [
        next(((phase, path, number) for path, number in reversed(items) if len(numbers[phase, path]) >= MANY), None)
        for phase, items in places
    ]
    found, part, last = [], 0, None
    for label in labels:
        if label is not None and label != last:
            part, last = part + (last is not None), label
        found.append(part)
    of = dict(zip(nodes, found, strict=True))
    split = any(is_getitem(node) and of.get(node.all_input_nodes[0], of[node]) != of[node] for node in nodes)
    return [0] * len(found) if split or part >= BACK * len(set(labels)) else found


def _module(node: Node) -> str:
    """The module path of a node; for a node of an update, that of its first operand that has one."""
    own = records(node)[0]
    if own.source.module or own.phase != "update":
        return own.source.module
    read = (records(operand)[0].source.module for operand in node.all_input_nodes if has_record(operand) and records(operand))
    return next((module for module in read if module), "")


def _items(module: str) -> Iterator[tuple[str, str]]:
    """(path of the list, item) for each list of modules in a module's path."""
    names = module.split(".")
    for at, name in enumerate(names):
        if name.isdigit():
            yield ".".join(names[:at]), name
