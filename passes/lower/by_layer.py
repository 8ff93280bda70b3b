"""Partition of a compiled region by layer, so that a backend compiles one of several equal layers.

    with region(0):  embedding, layers.0, ..., layers.31, head          one function of 32 layers: compiled for minutes
    with region(0):  embedding, layers.0
    with region(1):  layers.1                                           what regions 2 to 30 are too: compiled once
    ...

A layer is an item of a list of modules that has MANY of them in the region, forward, backward and update each for itself. An update's
operators stand in no module: theirs is that of the gradient that they read (clipping multiplies each). What else stands in none stays with
what comes before it; several results of a call stay together. Between two layers little is fused: the residual sum of one with the norm of
the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from torch.fx import Node

from meshc.ir import has_record, is_getitem, records

MANY: Final = 8
"""Layers of one list. Fewer are compiled as fast, and run a little faster, as one."""

BACK: Final = 2
"""A layer's operators come in so many pieces at most; where they are mixed more, nothing is cut."""


def parts(nodes: Sequence[Node]) -> list[int]:
    """Of each node of a region, in order, which part it is in; all in one where there is nothing to cut."""
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
    """In which a node stands; of an update's, in which the first of its operands does that stands in any."""
    own = records(node)[0]
    if own.source.module or own.phase != "update":
        return own.source.module
    read = (records(operand)[0].source.module for operand in node.all_input_nodes if has_record(operand) and records(operand))
    return next((module for module in read if module), "")


def _items(module: str) -> Iterator[tuple[str, str]]:
    """The lists that a module's path passes through, each with the item."""
    names = module.split(".")
    for at, name in enumerate(names):
        if name.isdigit():
            yield ".".join(names[:at]), name
