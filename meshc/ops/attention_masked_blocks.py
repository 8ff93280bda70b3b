"""CPU attention under a mask tensor, forward and backward, without the keys that are masked for a whole block of queries.

    documents 0 0 0 0 1 1 1 2         keys 0 1 2 3 4 5 6 7        blocks of two queries, each with the keys from the first to the last
    of a row of the batch    query 0       # . . . . . . .         that any of its queries sees:
                                   1       # # . . . . . .           0 and 1 of 8
                                   2       # # # . . . . .           0 to 3
                                   3       # # # # . . . .
                                   4       . . . . # . . .           4 and 5
                                   5       . . . . # # . .
                                   6       . . . . # # # .           4 to 7: two documents meet
                                   7       . . . . . . . #

The ranges depend on data (documents, padding, prefixes, blocks of a mask), so each call computes them: one pass over the mask, next to
products of `heads * head` times its size. Shapes: queries [batch, heads, q, head], keys and values [batch, heads, k, head], a bias
[batch|1, heads|1, q|1, k|1] that is added to the scores. On CUDA this would make the host wait for the device, so all is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from meshc.ops.attention_spans import BLOCK, BackwardKernel, Kernel

NEVER: Final = -1e30
"""A score with this bias or less has weight 0 next to any other (models use the least float32 or bfloat16)."""
ENOUGH: Final = 0.9
"""Share of all scores above which all are computed, in one call."""


@dataclass(frozen=True)
class VisibleBlock:
    """Queries of some rows of the batch, and the range of keys, possibly empty, from the first to the last that any of them sees."""

    batch: slice
    rows: slice
    keys: slice

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.batch, :, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.batch, :, self.keys]

    def of_bias(self, bias: Tensor) -> Tensor:
        batch, _, rows, _ = bias.shape
        return bias[self.batch if batch > 1 else slice(None), :, self.rows if rows > 1 else slice(None), self.keys]


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, empty: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The results of `kernel(q, k, v, bias, False)`; `empty` allocates them."""
    parts = visible_blocks(bias, q.shape[0], q.shape[2], k.shape[2])
    if parts is None:
        return kernel(q, k, v, bias, False)
    out, lse = empty()
    for part in parts:
        made, sums = part.of_queries(out), part.of_queries(lse)
        if part.keys.stop == part.keys.start:
            made.zero_(), sums.zero_()  # as the kernel returns them
            continue
        found, total = kernel(part.of_queries(q), part.of_keys(k), part.of_keys(v), part.of_bias(bias), False)
        made.copy_(found), sums.copy_(total)
    return out, lse


def backward(
    kernel: BackwardKernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor,
    zeros: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v; `zeros` allocates one in the layout of the kernel's."""
    parts = visible_blocks(bias, q.shape[0], q.shape[2], k.shape[2])
    if parts is None:
        return kernel(grad, q, k, v, bias, out, lse, False)
    dq, dk, dv = zeros(q), zeros(k), zeros(v)
    for part in parts:
        if part.keys.stop > part.keys.start:
            given = part.of_queries(grad), part.of_queries(q), part.of_keys(k), part.of_keys(v), part.of_bias(bias)
            found = kernel(*given, part.of_queries(out), part.of_queries(lse), False)
            part.of_queries(dq).copy_(found[0])
            part.of_keys(dk).add_(found[1])
            part.of_keys(dv).add_(found[2])
    return dq, dk, dv


def visible_blocks(bias: Tensor, batch: int, queries: int, keys: int) -> list[VisibleBlock] | None:
    """Blocks to compute, each query in exactly one; None where these would be nearly all scores, or there are few keys."""
    if bias.shape[3] != keys or keys <= BLOCK:
        return None
    found = list(_merge_equal_blocks(_blocks_of_queries(bias, batch, queries)))
    scores = sum((one.batch.stop - one.batch.start) * (one.rows.stop - one.rows.start) * (one.keys.stop - one.keys.start) for one in found)
    return found if scores <= ENOUGH * batch * queries * keys else None


def _blocks_of_queries(bias: Tensor, batch: int, queries: int) -> Iterator[list[VisibleBlock]]:
    """For each block of queries, its groups of consecutive rows of the batch that see the same keys."""
    step = BLOCK if bias.shape[2] > 1 else queries
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        seen = visible_key_ranges(bias[:, :, rows] if bias.shape[2] > 1 else bias)
        seen = seen if len(seen) == batch else seen * batch
        alike = [list(group) for _, group in groupby(range(batch), seen.__getitem__)]
        yield [VisibleBlock(slice(group[0], group[-1] + 1), rows, slice(*seen[group[0]])) for group in alike]


def visible_key_ranges(bias: Tensor) -> list[tuple[int, int]]:
    """(begin, end) for each row of the batch, the range of keys that any of these queries sees. A query all of whose scores have a finite
    bias of `NEVER` or less sees all keys: its softmax is as without the bias."""
    most = bias.amax((1, 2))
    seen = ~(most <= NEVER)  # NaN counts as seen
    lowered = bias.amax(3)
    seen |= ((lowered <= NEVER) & (lowered > -torch.inf)).any(2).any(1).unsqueeze(1)
    keys = seen.shape[1]
    first, last = seen.int().argmax(1), keys - seen.flip(1).int().argmax(1)
    nothing = ~seen.any(1)
    return [(0, 0) if dark else (begin, end) for dark, begin, end in zip(nothing.tolist(), first.tolist(), last.tolist(), strict=True)]


def narrow_to_visible_keys(bias: Tensor, keys: slice) -> slice:
    """`keys` narrowed to those from the first to the last that any query of the bias [batch|1, heads|1, q|1, keys] sees."""
    seen = [(begin, end) for begin, end in visible_key_ranges(bias) if end > begin]
    first, end = (min(begin for begin, _ in seen), max(end for _, end in seen)) if seen else (0, 0)
    return slice(keys.start + first, keys.start + end)


def _merge_equal_blocks(blocks: Iterator[list[VisibleBlock]]) -> Iterator[VisibleBlock]:
    """Consecutive blocks that see the same keys, merged into one."""
    held: list[VisibleBlock] = []
    for block in blocks:
        if [(one.batch, one.keys) for one in held] == [(one.batch, one.keys) for one in block]:
            held = [VisibleBlock(one.batch, slice(one.rows.start, more.rows.stop), one.keys) for one, more in zip(held, block, strict=True)]
            continue
        yield from held
        held = block
    yield from held
