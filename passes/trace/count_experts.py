"""Count experts: metrics of how often each routed expert is chosen, and how many choices exceed the capacity.

    own, slot = group_choices(choice, ..)      beside it      metric `routed:PATH` = sum(counts_of_rows(choice))      [experts]

Counts are sums over the batch like any other, so they cover the whole batch on every mesh. With a capacity they include all choices, and
`dropped:PATH` is how many of these were dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch.fx import Node

from meshc.frontend.train_step import DROPPED, ROUTED
from meshc.ir import Record, Source, record, records
from meshc.ir.functions import Function
from meshc.ir.graph import call, set_results
from meshc.ir.nodes import is_getitem
from meshc.ir.schemas import RESHAPES
from meshc.ops import sum_of_parts as _parts  # noqa: F401 - registers it
from meshc.passes.phases.traced_model import TracedModel
from meshc.program.program import Port

aten, meshc = torch.ops.aten, torch.ops.meshc

CAPPED: Final = (meshc.first_choices.default, meshc.heaviest_choices.default)
CHOOSING: Final = (meshc.group_choices.default, meshc.bounded_choices.default)
PRODUCTS: Final = (meshc.routed_mm.default, meshc.group_mm.default)
"""(rows, matrices of all experts, choice of each row, ...)"""
LAYOUT: Final = (*RESHAPES, aten.clone.default)


def count_experts(traced: TracedModel) -> TracedModel:
    """Adds to a training step one metric for each layer of experts, two where experts have a capacity."""
    joint = traced.operators()
    ports, results = list(joint.outputs), joint.results()
    for path, (product, choice, experts) in _routed_experts(list(joint.graph.nodes)).items():
        add = Beside(choice, record(product).source, traced.parts is not None)
        asked = choice.args[0] if choice.target in CAPPED else choice
        assert isinstance(asked, Node)
        counts = add.counts(asked, experts)
        found = [(Port("metric", ROUTED + path, (experts,), torch.int64), counts)]
        if asked is not choice:
            dropped = add.call(aten.sum.default, add.call(aten.sub.Tensor, counts, add.counts(choice, experts), shape=(experts,)))
            found.append((Port("metric", DROPPED + path, (), torch.int64), dropped))
        ports += [port for port, _ in found]
        results += [add.whole(node) for _, node in found]
    set_results(joint.graph, results)
    return replace(traced, joint=replace(joint, outputs=tuple(ports)))


def _routed_experts(nodes: list[Node]) -> dict[str, tuple[Node, Node, int]]:
    """By the path of a layer's experts: their first product, the choice that it reads, and the number of experts."""
    found: dict[str, tuple[Node, Node, int]] = {}
    for node in nodes:
        path = records(node)[0].source.module if node.target in PRODUCTS else ""
        if path and path not in found and record(node).phase == "forward":
            _, matrices, choice = node.args[:3]
            assert isinstance(matrices, Node) and isinstance(choice, Node)
            found[path] = node, *_find_choice(choice, record(matrices).shape[0])
    return found


def _find_choice(node: Node, places: int) -> tuple[Node, int]:
    """The choice of the model, or of a capacity, behind the operators that lay it out for products, and the number of experts: `places`,
    unless some of these are for copies."""
    while node.args and isinstance(made := node.args[0], Node):
        if is_getitem(node) and made.target in CHOOSING:
            assert isinstance(made.args[0], Node)
            made = made.args[0]
        elif node.target is meshc.choices_to_slots.default:
            slots = node.args[1]
            assert isinstance(slots, Node)
            places = record(slots).shape[0]
        elif node.target not in (*LAYOUT, meshc.choices_to_places.default):
            break
        node = made
    return node, places


class Beside:
    """Writes integer operators behind a node, attributed to its layer."""

    def __init__(self, node: Node, source: Source, parts: bool) -> None:
        self.last, self.source, self.parts = node, source, parts

    def call(self, target: Function, *args: object, shape: tuple[int, ...] = ()) -> Node:
        with self.last.graph.inserting_after(self.last):
            self.last = call(self.last.graph, Record(shape, torch.int64, source=self.source, phase="forward"), target, *args)  # type: ignore[arg-type]
        return self.last

    def counts(self, choice: Node, experts: int) -> Node:
        """How often each expert is chosen, [experts]."""
        shape = record(choice).shape
        rows = choice if len(shape) == 3 else self.call(aten.unsqueeze.default, choice, 0, shape=(1, *shape))
        by_row = self.call(meshc.counts_of_rows.default, rows, experts, shape=(record(rows).shape[0], experts))
        return self.call(aten.sum.dim_IntList, by_row, [0], shape=(experts,))

    def whole(self, count: Node) -> Node:
        """The sum over all microbatches, where a step is the mean of its microbatches."""
        return self.call(meshc.sum_of_parts.default, count, shape=record(count).shape) if self.parts else count
