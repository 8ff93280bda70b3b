"""Attention over a split sequence, by hand with torch.distributed, as a careful user would write it: a ring, or gathered keys and values.

    rank 0: tokens of chunks 0 and 3          rank 1: of chunks 1 and 2          so that both have as much causal work

Both use torch's own attention of a block, forward and backward; blocks are joined by their log-sum-exp. The next keys and values of the
ring are on their way while a block is computed, in backward with the gradients of those before. Parameters are DistributedDataParallel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import VOCAB, Batch, Decoder, FusedAttention
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

Piece = tuple[slice, slice, bool]
"""Which queries, which keys, and whether of these each query sees those up to its own."""
ALL = slice(None)

forward_of = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward_of = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Sum:
    """Of blocks of keys: [batch, heads, seq, size], and the log-sum-exp [batch, heads, seq]."""

    def __init__(self, like: Tensor) -> None:
        self.out = torch.zeros_like(like)
        self.lse = like.new_full(like.shape[:3], -torch.inf)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        before = self.lse[:, :, rows]
        both = torch.logaddexp(before, lse)
        mine = self.out[:, :, rows]
        mine.mul_((before - both).exp()[..., None]).add_(out * (lse - both).exp()[..., None])
        self.lse[:, :, rows] = both


def _attend(total: Sum, q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece]) -> None:
    for rows, seen, causal in pieces:
        total.add(rows, *forward_of(q[:, :, rows], k[:, :, seen], v[:, :, seen], 0.0, causal))


def _differentiate(grads: list[Tensor], grad: Tensor, saved: tuple[Tensor, ...], k: Tensor, v: Tensor, pieces: list[Piece]) -> None:
    """Adds to the gradients of queries, keys and values."""
    q, out, lse = saved
    for rows, seen, causal in pieces:
        given = (grad[:, :, rows], q[:, :, rows], k[:, :, seen], v[:, :, seen], out[:, :, rows], lse[:, :, rows].contiguous())
        for whole, part, place in zip(grads, backward_of(*given, 0.0, causal), (rows, seen, seen), strict=True):
            whole[:, :, place].add_(part)


class Ring(torch.autograd.Function):
    """(q, k, v) [batch, heads, seq of a rank, size] -> [batch, heads, seq of a rank, size]"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        total = Sum(q)
        for owner, held in _round(torch.stack([k, v]), group):
            _attend(total, q, *held, _pieces_of(owner, q.shape[2], group))
        ctx.save_for_backward(q, k, v, total.out, total.lse)
        ctx.group = group
        return total.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (q, k, v, *rest), group = ctx.saved_tensors, ctx.group
        grad, dq = grad.contiguous(), torch.zeros_like(q)
        arriving: Callable[[], Tensor] | None = None
        for owner, held in _round(torch.stack([k, v]), group):
            own = torch.zeros_like(held)
            _differentiate([dq, own[0], own[1]], grad, (q, *rest), *held, _pieces_of(owner, q.shape[2], group))
            if arriving is not None:
                own += arriving()
            arriving = _pass_on(own, group)
        assert arriving is not None
        return dq, *arriving(), None


def _round(held: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Whose keys and values are there, and they: the next ones are on their way meanwhile."""
    ranks, rank = group.size(), group.rank()
    for turn in range(ranks):
        coming = _pass_on(held, group) if turn + 1 < ranks else None
        yield (rank - turn) % ranks, held
        if coming is not None:
            held = coming()


def _pass_on(value: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    ranks, rank = group.size(), group.rank()
    taken = torch.empty_like(value)
    sent = dist.P2POp(dist.isend, value, (rank + 1) % ranks, group)
    works = dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, taken, (rank - 1) % ranks, group)])

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return taken

    return arrived


def _pieces_of(owner: int, length: int, group: ProcessGroup) -> list[Piece]:
    """Of a rank's queries and another's keys, each an early and a late chunk."""
    half = length // 2
    if owner == group.rank():
        return [(ALL, ALL, True)]
    return [(ALL, slice(0, half), False)] if owner < group.rank() else [(slice(half, None), ALL, False)]


class Gathered(torch.autograd.Function):
    """The same, of all keys and values at once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        ranks, half = group.size(), q.shape[2] // 2
        mine = torch.stack([k, v])
        parts = mine.new_empty((ranks, *mine.shape))
        dist.all_gather_into_tensor(parts.flatten(0, 1), mine, group=group)
        chunks = [parts[rank, :, :, :, :half] for rank in range(ranks)] + [parts[rank, :, :, :, half:] for rank in reversed(range(ranks))]
        whole = torch.cat(chunks, 3)
        total = Sum(q)
        _attend(total, q, *whole, _pieces_of_all(half, group))
        ctx.save_for_backward(q, k, v, total.out, total.lse)
        ctx.group, ctx.whole = group, whole
        return total.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (q, _, _, *rest), group = ctx.saved_tensors, ctx.group
        ranks, half = group.size(), q.shape[2] // 2
        dq, dkv = torch.zeros_like(q), torch.zeros_like(ctx.whole)
        _differentiate([dq, dkv[0], dkv[1]], grad.contiguous(), (q, *rest), *ctx.whole, _pieces_of_all(half, group))
        chunks = dkv.split(half, 3)
        parts = torch.stack([torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], 3) for rank in range(ranks)])
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=group)
        return dq, *mine, None


def _pieces_of_all(half: int, group: ProcessGroup) -> list[Piece]:
    ranks, rank = group.size(), group.rank()
    places = ((slice(0, half), rank), (slice(half, None), 2 * ranks - 1 - rank))
    before = [(rows, slice(0, chunk * half), False) for rows, chunk in places if chunk]
    return before + [(rows, slice(chunk * half, (chunk + 1) * half), True) for rows, chunk in places]


class Attention(nn.Module):
    """The projections of `FusedAttention`, with an attention over ranks between."""

    def __init__(self, fused: FusedAttention, over: Any, group: ProcessGroup) -> None:
        super().__init__()
        self.c_attn, self.c_proj = fused.c_attn, fused.c_proj
        self.hidden, self.heads, self.over, self.group = fused.hidden, fused.heads, over, group

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(self.hidden, dim=2))
        y = self.over.apply(q, k, v, self.group)
        return self.c_proj(y.transpose(1, 2).reshape(batch, seq, hidden))


class Split(nn.Module):
    """The decoder on a rank's tokens, and its loss of them: the mean over ranks is the batch's."""

    def __init__(self, model: Decoder, way: str, group: ProcessGroup) -> None:
        super().__init__()
        self.model = model
        for block in model.h:
            assert isinstance(block.attn, FusedAttention)
            block.attn = Attention(block.attn, {"ring": Ring, "gather": Gathered}[way], group)

    def forward(self, ids: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        x = self.model.wte(ids) + self.model.wpe(positions)
        for block in self.model.h:
            x = block(x)
        return F.cross_entropy(self.model.lm_head(self.model.ln_f(x)).view(-1, VOCAB), targets.reshape(-1))


def split(model: nn.Module, way: str, group: ProcessGroup) -> tuple[nn.Module, Callable[[Batch], Batch]]:
    """The model, and what gives a rank its tokens of a batch."""
    assert isinstance(model, Decoder)
    ranks, rank = group.size(), group.rank()

    def part(batch: Batch) -> Batch:
        positions = torch.arange(batch["ids"].shape[1])
        own = torch.cat([positions.chunk(2 * ranks)[chunk] for chunk in (rank, 2 * ranks - 1 - rank)])
        return {name: value[:, own] for name, value in batch.items()} | {"positions": own}

    return DistributedDataParallel(Split(model, way, group), process_group=group, gradient_as_bucket_view=True), part
