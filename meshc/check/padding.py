"""Faults of padding (positions added so that axes split evenly): reductions over padding that is not neutral, types with false zeros.

    x: "f32[batch 5/dp, in 4] pad(zero: 0.0)" = shard(y, 0, 2, coordinate)       padding is zero
    h: "f32[batch 5/dp, out 8]" = aten.addmm(b, x, w)                            padding may hold anything
    s: "f32[out 8] partial(sum: dp)" = aten.sum.dim_IntList(h, [0])              refused: the sum includes padding
    g: "f32[batch 5/dp, out 8] pad(zero: 0.0)" = aten.add.Tensor(h, 1)           refused: padding is not zero

Padding stays zero in layout operators, reductions between ranks, gathers and tiles; `mask` sets it. After any other operator it may hold
anything. Through lines with plain types it is followed as far as it is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshc import ir
from meshc.check.inferred_sharding import dim_text, padded_axes
from meshc.check.types import Wrong
from meshc.ir.reductions import as_integer
from meshc.ir.sharding import Sharding

if TYPE_CHECKING:
    from meshc.check.rule_shardings import RuledCall


def check_claims(padding: Mapping[str, float | None], declared: Sharding, sizes: Mapping[str, int]) -> None:
    """Raises Wrong for a type that declares padding zero that is not zero by `padding` (axis -> contents)."""
    for dim, place in sorted(declared.zero):
        part = declared.dims[dim][place]
        if any(padding.get(axis) != 0 for axis in padded_axes(part, sizes)):
            raise Wrong(f"its type says that the padding of [{part}] is zero; as its line makes it, it holds anything")


def check_sums(call: RuledCall) -> None:
    """Raises Wrong for padding that is reduced over and not neutral, or not zero where `rule.clean` needs it."""
    rule = call.rule
    if rule.kind == "layout":
        return
    summed = {letter for sums in rule.sums for letter in sums} if not rule.self_masked else set()
    for place, _, letter, parts in call.operand_dims():
        clean, tensor = place in rule.clean, call.tensors[place]
        dtype = ir.records(tensor)[0].dtype
        neutral = 0.0 if clean or dtype is None else rule.neutral if dtype.is_floating_point else as_integer(rule.neutral, dtype)
        for part in parts or () if clean or letter in summed else ():
            if any(call.given[place].padding.get(axis, neutral) != neutral for axis in padded_axes(part, call.sizes)):
                told = f"it takes the padding of {tensor} in, which is [{dim_text(parts or ())}] and holds anything there"
                raise Wrong(f"{told}: mask it with {neutral}")
