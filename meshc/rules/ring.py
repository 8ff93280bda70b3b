"""Lowering of attention to a ring: keys and values pass round the ranks block by block, and no rank ever holds all; flops of attention.

    out, lse = attention(q, k, v)       k1 = ring_shift(k, 1)   v1 = ring_shift(v, 1)       on their way ...
  becomes on 3 ranks                    out, lse = attention(q, k, v)                       ... meanwhile
                                        k2 = ring_shift(k1, 1)   v2 = ring_shift(v1, 1)
                                        more = attention(q, k1, v1)                         out, lse = attention_merge(out, lse, *more)
                                        more = attention(q, k2, v2)                         out, lse = attention_merge(out, lse, *more)

In backward keys and values pass round again, followed by the partial sums of their gradients, which the last shift returns to their rank:

    dq, dk, dv = backward(q, k, v)      dq1, gk, gv = backward(q, k1, v1)       gk = ring_shift(gk, 1)      beside the next block
                                        dq2, dk2, dv2 = backward(q, k2, v2)     gk = ring_shift(gk + dk2, 1)    back on its rank
                                        dk = dk + gk

In zigzag order every rank has as much work at each step (`zigzag.py`). Under a sliding window no block passes on farther than the window
reaches. Keys and values that layout operators expand (for heads that share them) travel before the expansion. Liu, Zaharia, Abbeel: Ring
Attention with Blockwise Transformers (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import ClassVar

import torch
from torch.fx import Node

from meshc.ir import is_getitem, record, spmd
from meshc.ir.schemas import RESHAPES, named_arguments, place_of
from meshc.ir.sizes import Size
from meshc.ops import attention as _attention  # noqa: F401 - registers it
from meshc.ops import attention_join as _join  # noqa: F401 - likewise
from meshc.rules.operator import Shapes
from meshc.rules.rule import Extents, Local, integer

aten, meshc = torch.ops.aten, torch.ops.meshc

def ring_steps(queries: int, keys: int, tile: int, ranks: int, causal: bool, window: int, offset: int) -> int:
    """How often a block of keys is passed on: to all ranks, or as far as a window reaches if sizes are static."""
    if not causal or not window or offset or queries != keys or any(isinstance(size, Size) for size in (queries, tile)):
        return ranks - 1
    return min(ranks - 1, -(-(window - 1) // tile))


def mask_of(node: Node) -> tuple[bool, object, int, int]:
    """(causal, scale, window, offset) of a call of attention."""
    causal, scale, window, offset = (*node.args[place_of(node, "causal") :], 0, 0)[:4]
    return bool(causal), scale, integer(window), integer(offset)


def draws_of(local: Local, back: int) -> Extents:
    """The tile of dropped weights, as arguments: of the rank's queries and, where keys are split, of those of the rank `back` places before
    this one. Empty where nothing is dropped."""
    if named_arguments(local.node)["seed_step"] is None:
        return {}
    return local.weights_drawn("bhqk", {"k": back})


class Ring:
    """Lowering of one attention whose queries and keys are both split by one axis."""

    turns_heads: ClassVar[bool] = True
    """Whether keys and values may travel with their dims in another order."""

    def __init__(self, local: Local) -> None:
        self.local = local
        node, self.named = local.node, local.arguments()
        self.how = causal, _, window, offset = mask_of(node)
        self.axes = list(local.axes("q"))
        self.of_bias: list[Node] = []
        sizes = local.global_size("q"), local.global_size("k"), local.local_size("k")
        self.ranks = local.ranks(self.axes)
        self.steps = ring_steps(*sizes, self.ranks, causal, window, offset)
        shared = {index: heads_summed_together(node, index) for index in (1, 2)}
        self.shared = {index: heads if local.has_whole_groups("h", heads) else 1 for index, heads in shared.items()}

    def reorder(self, x: Node, dim: int = 2) -> Node:
        """An operand in the order in which blocks are computed."""
        return x

    def restore_order(self, x: Node) -> Node:
        """A result in natural order again."""
        return x

    def blocks(self, k: Node, v: Node) -> Iterator[tuple[Node, Node]]:
        """Yields keys and values of each block, the rank's own first; the next block's transfer starts before each yield."""
        travelling = _TravellingBlock(self, k), _TravellingBlock(self, v)
        for step in range(self.steps + 1):
            here = [one.start(last=step == self.steps) for one in travelling]
            keys, values = (one.expand(small) for one, small in zip(travelling, here, strict=True))
            yield keys, values

    def shift(self, x: Node, by: int) -> Node:
        return self.local.ring_shift(x, self.axes, by)

    def block_arguments(self, step: int) -> tuple[object, ...]:
        """The numbers of a block's call: mask settings, starts of queries and keys, number of keys without padding."""
        numbers = *self.how, self.local.start("q"), self.local.start("k", step), self.local.count("k", step)
        draws = draws_of(self.local, step).values()
        return (*numbers, *(self.named[name] for name in ("seed_step", "call", "p")), *draws) if draws else numbers

    def bias(self, step: int) -> Node | None:
        """The part of the bias, which is whole along keys, that belongs to a block."""
        bias: Node | None = self.named["bias"]
        if bias is None or self.local.shape(bias)[3] == 1:
            return bias
        tiled, length = self.local.local_size("k") * self.ranks, self.local.global_size("k")
        if -(-length // self.ranks) * self.ranks != tiled:  # a tile is several positions of the major factor, each of several keys
            bias = self.local.emit(aten.constant_pad_nd.default, bias, [0, tiled - length], 0)
        return self.local.emit(spmd.shard, bias, 3, self.ranks, self.local.place(self.axes[0], step))

    def cast_for_sum(self, x: Node) -> Node:
        """x in the dtype in which parts are added up, at least float32."""
        return self._cast(x, torch.float32) if self.local.dtype(x).itemsize < 4 else x

    def cast_like(self, x: Node, like: Node) -> Node:
        return self._cast(x, self.local.dtype(like)) if self.local.dtype(x) != self.local.dtype(like) else x

    def _cast(self, x: Node, dtype: torch.dtype) -> Node:
        return self.local.emit(aten._to_copy.default, x, dtype=dtype)

    def sum_shared_heads(self, gradient: Node, index: int) -> Node:
        """A gradient of keys or values for transfer: summed over heads that share keys, if their gradients are only ever summed."""
        heads = self.shared[index]
        if heads == 1:
            return gradient
        rows, all_heads, keys, size = self.local.shape(gradient)
        grouped = self.local.emit(aten.reshape.default, gradient, [rows, all_heads // heads, heads, keys, size])
        return self.local.emit(aten.sum.dim_IntList, grouped, [2])

    def spread_over_heads(self, total: Node, index: int) -> Node:
        """The sum of `fewer` as gradients of all heads: the first head of a group has the sum, the others have zero."""
        heads = self.shared[index]
        if heads == 1:
            return total
        rows, groups, keys, size = self.local.shape(total)
        first = self.local.emit(aten.unsqueeze.default, total, 2)
        padded = self.local.emit(aten.constant_pad_nd.default, first, [0, 0, 0, 0, 0, heads - 1], 0)
        return self.local.emit(aten.reshape.default, padded, [rows, groups * heads, keys, size])

    def forward(self) -> list[Node]:
        q, k, v = (self.named[name] for name in "qkv")
        asked = self.reorder(q)
        blocks = enumerate(self.blocks(k, v))
        out, lse = self.join_blocks(self.attend_block(asked, *block, self.bias(step), step) for step, block in blocks)
        return [self.restore_order(self.cast_like(out, q)), self.restore_sums(lse)]

    def restore_sums(self, lse: Node) -> Node:
        return self.restore_order(lse)

    def attend_block(self, q: Node, keys: Node, values: Node, bias: Node | None, step: int) -> Node:
        """Attention to one block of the keys: (output, log-sum-exp)."""
        return self.local.emit(meshc.attention.default, q, keys, values, bias, *self.block_arguments(step))

    def gradients(self, q: Node, keys: Node, values: Node, bias: Node | None, known: Sequence[Node], step: int) -> list[Node]:
        """Gradients of the queries, and of a block's keys and values. `known`: gradient of the output, the output, log-sum-exp."""
        grad, *sums = known
        made = self.local.emit(self.local.node.target, grad, q, keys, values, bias, *sums, *self.block_arguments(step))
        if made.target is meshc.attention_bias_backward.default:
            self.of_bias.append(self.local.item(made, 3))
        return [self.local.item(made, index) for index in range(3)]

    def join_blocks(self, parts: Iterable[Node]) -> tuple[Node, Node]:
        """Merges attention to each block of the keys, one after the other: (output, log-sum-exp)."""
        emit, item = self.local.emit, self.local.item
        found: tuple[Node, Node] | None = None
        for made in parts:
            part = item(made, 0), item(made, 1)
            if found is not None:
                both = emit(meshc.attention_merge.default, *found, *part)
                part = item(both, 0), item(both, 1)
            found = part
        assert found is not None
        return found

    def backward(self) -> list[Node]:
        q, k, v = (self.named[name] for name in "qkv")
        grad, asked, *rest = (self.reorder(self.named[name]) for name in ("grad", "q", "out", "lse"))
        emit = self.local.emit
        dq: Node | None = None
        own: list[Node] = []
        travelling: list[Node] = []
        for step, (keys, values) in enumerate(self.blocks(k, v)):
            part, *given = self.gradients(asked, keys, values, self.bias(step), (grad, *rest), step)
            dq = self.cast_for_sum(part) if dq is None else emit(aten.add.Tensor, dq, part)
            given = [self.sum_shared_heads(one, index) for index, one in enumerate(given, 1)]
            if step == 0:
                own = given
                continue
            if travelling:
                given = [emit(aten.add.Tensor, there, here) for there, here in zip(travelling, given, strict=True)]
            far = self.ranks - self.steps if step == self.steps else 1
            travelling = [self.shift(one, far) for one in given]
        assert dq is not None
        if travelling:
            own = [emit(aten.add.Tensor, here, there) for here, there in zip(own, travelling, strict=True)]
        return [
            self.restore_order(self.cast_like(dq, q)),
            *(self.spread_over_heads(self.restore_order(one), index) for index, one in enumerate(own, 1)),
            *([self.bias_gradient()] if self.of_bias else []),
        ]

    def bias_gradient(self) -> Node:
        """The bias's gradient [.., q of the rank, all keys]. Blocks give the columns of rank r, r - 1, ..., round the ring; tile j comes
        with block r - j, so the tiles are reordered."""
        emit, shape = self.local.emit, self.local.shape
        if shape(self.of_bias[0])[3] == 1:
            total, *rest = self.of_bias
            for one in rest:
                total = emit(aten.add.Tensor, total, one)
            return total
        beside = emit(aten.cat.default, self.of_bias, 3)
        tiles = [emit(spmd.shard, beside, 3, self.ranks, self.local.place(self.axes[0], tile)) for tile in range(self.ranks)]
        found, length = emit(aten.cat.default, tiles, 3), self.local.global_size("k")
        return found if length == self.local.local_size("k") * self.ranks else emit(aten.slice.Tensor, found, 3, 0, length)


def heads_summed_together(backward: Node, index: int) -> int:
    """Heads in a group that shares keys, if all readers of gradient `index` of an attention sum over each group; else 1."""
    read = [user for user in backward.users if is_getitem(user) and user.args[1] == index]
    views = [user for gradient in read for user in gradient.users]
    found = {_group_of(view) for view in views}
    return found.pop() if len(found) == 1 else 1


def _group_of(view: Node) -> int:
    """Heads of a group in a view [batch, groups, heads of a group, keys, head], if only its sums over a group are read; else 1."""
    if view.target not in RESHAPES:
        return 1
    (gradient,) = view.all_input_nodes
    (rows, _, *rest), shape = record(gradient).shape, record(view).shape
    if len(shape) != 5 or [shape[0], *shape[3:]] != [rows, *rest]:
        return 1
    sums = all(user.target is aten.sum.dim_IntList and user.args[1] == [2] and not user.kwargs for user in view.users)
    return shape[2] if sums else 1


class _TravellingBlock:
    """Keys or values that pass round the ring, in their smallest form: before layout operators expand them."""

    def __init__(self, ring: Ring, x: Node) -> None:
        self.ring, self.own = ring, x
        self.first, self._expand = ring.local.before_expansion(x, ring.turns_heads)
        self.small = ring.reorder(self.first, len(ring.local.shape(self.first)) - 2)

    def start(self, last: bool) -> Node:
        """The rank's present block; unless `last`, its transfer to the next rank starts."""
        here = self.small
        if not last:
            self.small = self.ring.shift(here, 1)
        return here

    def expand(self, small: Node) -> Node:
        """A block expanded to the form that attention reads."""
        return self.own if small is self.first else self._expand(small)


def attention_flops(node: Node, shapes: Shapes) -> float:
    return 4.0 * prod(shapes[0]) * shapes[1][-2]


def attention_gradient_flops(node: Node, shapes: Shapes) -> float:
    return 10.0 * prod(shapes[1]) * shapes[2][-2]
