"""Sharding rules of routed experts in groups (`meshc/ops/expert_groups.py`): an axis that splits groups splits their matrices.

    group_mm    rows [q/ep, r, k], matrices [experts 8/ep, k, n], choice [q/ep, r]  ->  [q/ep, r, n]
    to_groups   x [t, h], own [q/ep, t, m]  ->  [q/ep, t, m, h]                         each rank has its own group's rows
    from_groups rows [q/ep, t, m, h], own   ->  [t, h] partial(sum: ep)

A group goes with a window of as many experts as it has, so that three ranks have 3, 3 and 2 of 8 experts. Experts may have copies on other
ranks (`meshc/ops/expert_copies.py`): each rank contributes the rows of its own tile as a partial sum, and gradients of copies are added up:

    copies_of     x [experts 8/ep, ..], copies [q, n]              ->  [q, n, ..] partial(sum: ep)
    added_copies  grad [q, n, ..], copies [q, n]                   ->  [experts 8/ep, ..]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from meshc.ir import records
from meshc.ir.schemas import named_arguments
from meshc.ir.window import Window
from meshc.ops import bounded_groups as _bounded_groups  # noqa: F401 - registers them
from meshc.ops import capacity as _capacity  # noqa: F401 - likewise
from meshc.ops import expert_copies as _expert_copies  # noqa: F401 - likewise
from meshc.ops import expert_groups as _expert_groups  # noqa: F401 - likewise
from meshc.ops import expert_slots as _expert_slots  # noqa: F401 - likewise
from meshc.ops import used_rows as _used_rows  # noqa: F401 - likewise
from meshc.rules.contraction import WEIGHT, product_flops
from meshc.rules.index import inside_tile
from meshc.rules.operator import EITHER, Operator, Shapes, declarations
from meshc.rules.rule import ALONE, Local, Made, Rule, RuleFunction, by_text, einsum, shape_of, where_split
from meshc.rules.scan import gather_rows, on_side

aten, meshc = torch.ops.aten, torch.ops.meshc

EXPERTS, IN_LINE = ({"q": "experts", letter: "experts"} for letter in "ge")


def _lower_choices(local: Local) -> Node:
    """The rank's groups, numbered from the global index of its first one. Padding of tokens chooses no expert."""
    first, start = named_arguments(local.node)["first"], local.start("q")
    if first != 0 and start != 0:
        raise ValueError(f"{local.node.name}: groups that begin at {first} are not split")
    chosen = local.neutralise(local.operands[0], "t", -1)
    return local.call(chosen, groups=local.local_size("q"), first=start if first == 0 else first)


def _in_windows(text: str, lower: Callable[[Local], Made], other: str = "g", **fields: Any) -> RuleFunction:
    """A rule by its text, in which each group `q` goes with a window of as many experts as the argument `each` says."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        size = named_arguments(node)["each"]
        return einsum(text, node, tensors, lower=lower, windows={"q": (other, Window(stride=size, span=size))}, **fields)

    return rule


def _lower_mm(local: Local) -> Node:
    rows, matrices, choice = local.operands
    return local.call(rows, local.window(matrices, 0, "q"), choice)


def _lower_outer(local: Local) -> Node:
    count = local.local_size("q") * named_arguments(local.node)["each"]
    return local.sum_of_windows(local.call(*local.operands, count=count), 0, "q")


def _lower_copies(local: Local) -> Node:
    x, copies = local.operands
    return local.call(x, _local_copies(local, copies))


def _lower_sum_copies(local: Local) -> Node:
    grad, copies = local.operands
    return local.call(grad, _local_copies(local, copies), count=local.local_size("e"))


def _local_copies(local: Local, copies: Node) -> Node:
    """Copies of rows of this rank's tile, by local index; -1 for others."""
    if not local.axes("e"):
        return copies
    places, inside = inside_tile(local, copies, "e")
    return local.emit(aten.where.ScalarOther, inside, places, -1)


def _lower_by_group(local: Local) -> Node:
    return local.call(local.window(local.operands[0], 0, "q"), groups=local.local_size("q"))


def _in_line(node: Node, tensors: list[Node]) -> Rule:
    each = shape_of(tensors[0])[1]
    windows = {"q": ("e", Window(stride=each, span=each))}
    return einsum("q s! ... -> e ...", node, tensors, lower=_lower_in_line, windows=windows, roles=IN_LINE)


def _lower_in_line(local: Local) -> Node:
    x = local.neutralise(local.operands[0], "q", 0.0)
    if not local.axes("q"):
        return local.call(x)
    groups, each, *_ = local.shape(x)
    return local.sum_of_windows(local.call(x, count=groups * each), 0, "q")


def _lower_bounded_choices(local: Local) -> Node:
    """The rank's groups, numbered from the global index of its first one. Padding of tokens chooses no expert."""
    chosen = local.neutralise(local.operands[0], "b", -1)
    return local.call(chosen, groups=local.local_size("q"), first=local.start("q"), at=_module_path(local))


def _lower_counts(local: Local) -> Node:
    return local.call(_mask_choices(local, "s"))


def _mask_choices(local: Local, *letters: str) -> Node:
    """Choices, with -1 in the padding of these letters."""
    x = local.operands[0]
    for letter in ("b", *letters):
        x = local.neutralise(x, letter, -1)
    return x


def _lower_first(local: Local) -> Node:
    """Tiles of a row follow each other: `before` of a tile includes the counts of the tiles that precede it."""
    chosen, before, axes = _mask_choices(local, "s"), local.neutralise(local.operands[1], "b", 0, 1), local.axes("s")
    if axes:
        mine = local.emit(meshc.counts_of_rows.default, chosen, local.shape(before)[1])
        totals = gather_rows(local, mine, axes)
        totals = local.emit(aten.where.ScalarOther, on_side(local, totals, axes), totals, 0)
        before = local.emit(aten.add.Tensor, before, local.emit(aten.sum.dim_IntList, totals, [0]))
    return local.call(chosen, before, at=_module_path(local))


def _lower_heaviest(local: Local) -> Node:
    return local.call(_mask_choices(local), local.operands[1], at=_module_path(local))


def _module_path(local: Local) -> str:
    """The module's path in the model, for errors."""
    return records(local.node)[0].source.module


def _summing(text: str) -> RuleFunction:
    """The rule of a sum of rows: a reduction of the rows is deferred past the sum, which is smaller."""
    return by_text(text, linear=ALONE, defers=True)


def _group_flops(node: Node, shapes: Shapes) -> float:
    """Where tokens choose evenly, a share of rows meets a matrix: `filled`."""
    return product_flops(node, shapes) * named_arguments(node)["filled"]


OPERATORS = declarations({
    "meshc.group_choices": Operator(
        by_text("t k! -> q t m! | q t m!", lower=_lower_choices, self_masked=True, major={"q"}), any_order=True
    ),
    "meshc.to_groups": Operator(by_text("t h, q t m! -> q t m! h"), linear=ALONE),
    "meshc.from_groups": Operator(_summing("q t m! h, q t m! -> t h +q"), linear=ALONE),
    "meshc.in_slots": Operator(by_text("q t h, q t m! -> q t m! h"), linear=ALONE),
    "meshc.over_slots": Operator(_summing("q t m! h, q t m! -> q t h"), linear=ALONE),
    "meshc.weights_of_groups": Operator(by_text("t k!, q t m!, q t m! -> q t m!"), linear=ALONE),
    "meshc.weights_to_tokens": Operator(_summing("q t m!, q t m!, q t m! -> t k! +q"), linear=ALONE),
    "meshc.experts_by_slot": Operator(by_text("e! -> s!")),
    "meshc.in_order": Operator(by_text("e! ..., s, e! -> s ...", clean=(1,))),
    "meshc.choices_to_slots": Operator(by_text("t k, e! -> t k")),
    "meshc.choices_to_places": Operator(by_text("t k, q! n!, t -> t k")),
    "meshc.copies_of": Operator(
        by_text("e ..., q! n! -> q! n! ... +e", lower=_lower_copies, self_masked=True, clean=(1,), major={"e"}, linear=ALONE)
    ),
    "meshc.added_copies": Operator(
        by_text("q! n! ..., q! n! -> e ...", lower=_lower_sum_copies, clean=(1,), major={"e"}, linear=ALONE, defers=True)
    ),
    "meshc.by_group": Operator(_in_windows("e ... -> q s! ...", _lower_by_group, "e", roles=IN_LINE)),
    "meshc.in_line": Operator(_in_line),
    "meshc.counts_of_rows": Operator(by_text("b s k! -> b e! +s", lower=_lower_counts, self_masked=True), any_order=True),
    "meshc.first_choices": Operator(by_text("b s k!, b e! -> b s k!", lower=_lower_first, self_masked=True, major={"s"})),
    "meshc.heaviest_choices": Operator(by_text("b s! k!, b s! k! -> b s! k!", lower=_lower_heaviest, self_masked=True)),
    "meshc.bounded_choices": Operator(by_text("b s! k! -> q b p! | q b p!", lower=_lower_bounded_choices, self_masked=True)),
    "meshc.to_places": Operator(by_text("b s! h, q b p! -> q b p! h"), linear=ALONE),
    "meshc.in_places": Operator(by_text("q b s! h, q b p! -> q b p! h"), linear=ALONE),
    "meshc.from_places": Operator(_summing("q b p! h, q b p! -> b s! h +q"), linear=ALONE),
    "meshc.over_places": Operator(_summing("q b p! h, q b p! -> q b s! h"), linear=ALONE),
    "meshc.group_mm": Operator(
        _in_windows("q r k, g k n, q r -> q r n +k", _lower_mm, roles={**WEIGHT, **EXPERTS}),
        linear=EITHER,
        any_order=True,
        flops=_group_flops,
    ),
    "meshc.group_outer": Operator(
        _in_windows("q r k, q r n, q r -> g k n +r", where_split("q", _lower_outer)), linear=EITHER, any_order=True, flops=_group_flops
    ),
    "meshc.used_mm meshc.used_outer": Operator(flops=_group_flops),
})
