"""Order of tiles, natural or zigzag (`meshc/ir/sharding.py`): faults of operands in another order than operators take, and exchanges.

    cumsum of [batch 4, seq 8/cp~zigzag] along seq               refused: cumsum takes natural order
    add of [seq 8/cp~zigzag] and [seq 8/cp]                      refused: add takes operands in one order
    attention_zigzag of [batch 4, heads 2, seq 8/cp, head 8]     refused: attention_zigzag takes zigzag order
    to_zigzag(x, ["cp"], 0) of [seq 8/cp]                        gives [seq 8/cp~zigzag], and from_zigzag of that [seq 8/cp]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch

from meshc.check.inferred_sharding import InferredSharding, Parts, dim_text
from meshc.check.types import Wrong
from meshc.ir import op_name
from meshc.ir.sharding import ZIGZAG, local_size

if TYPE_CHECKING:
    from meshc.check.rule_shardings import RuledCall, RulesProtocol

aten = torch.ops.aten


def check(call: RuledCall, rules: RulesProtocol, piece: bool) -> None:
    """Raises Wrong for operands in another order than the operator takes. `piece`: whether the line is one of several in a rule's lowering,
    which may take any order; the next line with a declared sharding is checked."""
    found: dict[str, tuple[Parts, str]] = {}
    takes = op_name(call.node)
    for place, dim, letter, parts in call.operand_dims():
        if parts is None:
            continue
        here = f"dim {dim} of {call.tensors[place]}"
        if letter in call.rule.zigzag and not is_reordered(parts):
            raise Wrong(f"{here} is [{dim_text(parts)}]: {takes} takes it in {ZIGZAG} order")
        if letter in call.rule.zigzag and not _has_own_halves(parts, call.sizes):
            raise Wrong(f"{here} is [{dim_text(parts)}]: {takes} takes it in halves, and half a rank's tile is no whole position")
        if not piece and is_reordered(parts) and not rules.in_any_order(call.node, call.rule, letter):
            raise Wrong(f"{here} is [{dim_text(parts)}]: {takes} takes it in natural order")
        known, who = found.setdefault(letter, (parts, here))
        if _axes(known) == _axes(parts) and _cuts(known) != _cuts(parts):
            raise Wrong(f"{who} is [{dim_text(known)}] and {here} is [{dim_text(parts)}]: {takes} takes them in one order")


def check_natural(given: InferredSharding, dim: int, does: str) -> None:
    """Raises Wrong if `dim` is not in natural order, for a line that reads neighbours or counts positions (`does` says which)."""
    parts = given.dims[dim]
    if parts is not None and is_reordered(parts):
        raise Wrong(f"it {does} along dim {dim} of its operand, which is [{dim_text(parts)}] and not in natural order")


def reorder_dim(
    given: InferredSharding, dim: int, axes: Sequence[str], before: str, after: str, sizes: Mapping[str, int]
) -> InferredSharding:
    """The sharding after an exchange of order `before` for order `after` along `dim`. Raises Wrong if `dim` is in another order; `dim`
    becomes unknown if `axes` do not split it, or if its tiles have no halves of their own (padding)."""
    parts = given.dims[dim]
    split = [part for part in parts or () if part.axes]
    ours = parts is not None and len(split) == 1 and list(split[0].axes) == list(axes)
    if parts is not None and ours and split[0].order != before:
        raise Wrong(f"it takes dim {dim} of its operand, which is [{dim_text(parts)}], in another order than {before or 'the natural one'}")
    if parts is None or not ours or not _has_own_halves(parts, sizes):
        return replace(given.with_dim(dim, None), runs=given.axis_runs())
    return given.with_dim(dim, tuple(replace(part, order=after) if part is split[0] else part for part in parts))


def is_reordered(parts: Parts) -> bool:
    """Whether any part of a dim is in another order than the natural one."""
    return any(part.order for part in parts)


def _has_own_halves(parts: Parts, sizes: Mapping[str, int]) -> bool:
    """Whether the halves of a rank's positions of a dim are the halves of its tile of the split part."""
    place = next(place for place, part in enumerate(parts) if part.axes)
    before, inside = (prod(part.size for part in some) for some in (parts[:place], parts[place + 1 :]))
    return before == 1 and (inside == 1 or local_size(parts[place], sizes) % 2 == 0)


def _axes(parts: Parts) -> list[tuple[str, ...]]:
    return [part.axes for part in parts if part.axes]


def _cuts(parts: Parts) -> list[tuple[str, ...]]:
    return [part.cuts for part in parts if part.axes]
