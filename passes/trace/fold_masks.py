"""Fold masks: masks that are provably causal, windowed or full, as attributes of attention.

    le = aten.le.Tensor(keys, queries)
    where = aten.where.self(le, zero, minus_infinity)                                   becomes
    attention = meshc.attention(q, k, v, where, False, 0.35)        attention = meshc.attention(q, k, v, None, True, 0.35)

A stock causal model passes a dense mask with `is_causal=False`: quadratic memory, and work on masked positions. A mask is evaluated where
it depends on positions alone, or, where it would be too large for that, followed as a range of keys for each query. A mask that depends on
an input (padded tokens) is unchanged.
Runs right after `differentiate`: values are pure there, and forward and backward have a node each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from meshc import ir
from meshc.ir.keys import is_a, name_of
from meshc.ops import implementations as _operators  # noqa: F401 - registers them
from meshc.ops.attention_masked_blocks import NEVER
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.known_values import KnownValues
from meshc.passes.trace.seen_ranges import Ranges, SeenRanges

meshc = torch.ops.meshc

BIAS: dict[object, int] = {
    meshc.attention.default: 3, meshc.attention_backward.default: 4,
    meshc.explicit_attention.default: 3, meshc.explicit_attention_backward.default: 4,
}  # fmt: skip
"""Operator -> the position of its bias."""
CAUSAL: dict[object, int] = {
    meshc.attention.default: 4, meshc.attention_backward.default: 7,
    meshc.explicit_attention.default: 10, meshc.explicit_attention_backward.default: 13,
}  # fmt: skip


@dataclass(frozen=True)
class Pattern:
    """Query i sees every key (not causal), or keys j <= i + offset, of these the last `window` if that is not 0."""

    causal: bool
    window: int = 0
    offset: int = 0


def fold_masks(traced: TracedModel) -> TracedModel:
    """Changes the attention operators of the joint graph; operators that only computed their masks are erased."""
    joint = traced.operators()
    graph, ports = joint.graph, joint.placeholders()
    known = KnownValues({node: joint.constants[name_of(key)] for key, node in ports.items() if is_a(key, "constant")})
    ranges = SeenRanges(known)
    patterns: dict[tuple[Node, int], Pattern | None] = {}
    for node in graph.nodes:
        if node.target not in BIAS or not isinstance(node.args[BIAS[node.target]], Node):
            continue
        bias = node.args[BIAS[node.target]]
        key = (bias, _queries(node))
        if key not in patterns:
            value, queries = known.of(bias), _queries(node)
            patterns[key] = pattern_of(value, queries) if value is not None else pattern_of_ranges(ranges.of(bias), queries)
        found = patterns[key]
        if found is not None and not node.args[CAUSAL[node.target]]:
            _fold(node, found)
    graph.eliminate_dead_code()
    return traced


def _queries(node: Node) -> int:
    return ir.records(node)[0].shape[2]  # of the output, or of the queries' gradient


def _fold(node: Node, found: Pattern) -> None:
    bias, causal = BIAS[node.target], CAUSAL[node.target]
    args = list(node.args[: causal + 2])
    args[bias], args[causal] = None, found.causal
    if found.window or found.offset:
        args += [found.window, found.offset]
    node.args = tuple(args)


def pattern_of(bias: Tensor | None, queries: int) -> Pattern | None:
    """The pattern of a bias [batch|1, heads|1, q|1, k], if it has one, the same for all of the batch and all heads."""
    if bias is None:
        return None
    seen = bias == 0
    if not bool((seen | (bias <= NEVER)).all()):
        return None
    first = seen[:1, :1]
    if not bool((seen == first).all()):
        return None
    rows = first[0, 0].expand(queries, -1)
    if bool(rows.all()):
        return Pattern(False)
    return _causal_pattern(rows)


def _causal_pattern(seen: Tensor) -> Pattern | None:
    """The causal pattern of `seen` [queries, keys], if each row is a range that ends, and begins, one key further than the row before."""
    ends = seen.shape[1] - seen.flip(1).int().argmax(1)
    return _windowed_pattern(seen.int().argmax(1), ends, seen.sum(1), seen.shape[1])


def _windowed_pattern(begins: Tensor, ends: Tensor, counts: Tensor, keys: int) -> Pattern | None:
    """The causal pattern of rows with these ranges: per row the first key that is seen, the one behind the last, and how many are seen."""
    queries = len(ends)
    offset = int(ends[0]) - 1
    at = torch.arange(queries) + offset
    if offset < 0 or not bool((ends == at + 1).all()):
        return None
    window = int(counts.max())
    for pattern in (Pattern(True, 0, offset), Pattern(True, window, offset)):
        first = (at - (pattern.window or keys + queries) + 1).clamp(min=0)
        if bool((counts == ends - first).all()) and bool((begins == first).all()):
            return pattern
    return None


def pattern_of_ranges(found: Ranges | None, queries: int) -> Pattern | None:
    """The pattern of a bias that is a range in every row."""
    if found is None or found.truth:
        return None
    inside, outside = float(found.inside), float(found.outside)
    begins, ends = found.begin.expand(queries), found.end.expand(queries)
    if inside == 0 and outside == 0 or inside == 0 and bool(((begins == 0) & (ends == found.keys)).all()):
        return Pattern(False)
    if inside != 0 or outside > NEVER or bool((ends <= begins).any()):
        return None
    return _windowed_pattern(begins, ends, ends - begins, found.keys)
