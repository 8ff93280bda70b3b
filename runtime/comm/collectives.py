"""Asynchronous collectives and point-to-point messages: each starts at once and returns a `CollectiveWork` to wait on.

    work = gather_dim(x, dim=1, group=group)    # communication runs ...
    y = matmul(a, b)                               # ... beside this ...
    x_whole = work.wait()                       # ... until the value is needed

A `group` is what `Groups.group` returns; None stands for a group of one rank, which communicates nothing. All ranks of a group make the
same calls in the same order, under `no_grad`, and their tensors have the same shape and dtype. Nobody writes a tensor that was passed in,
or reads one that will come out, before `wait` has returned.

On CUDA every call is torch's own. On CPU (gloo) some are not, since torch 2.13's are slow there: its gloo reduce-scatter is an
all-reduce, its all-gather goes through a second buffer, and both all-gather and all-reduce have many sequential steps. Here a
reduce-scatter is an all-to-all and a local reduction; a collective of two ranks is one exchange; and a small tensor goes from each rank to
all others at once. Only a small all-reduce moves more bytes than the collective it replaces. Time against torch's own, two ranks
of one thread each on two busy cores, 64 KiB / 1 MiB / 4 MiB: reduce-scatter 0.4 / 0.35 / 0.5, all-gather 0.7 / 0.5 / 0.8, all-reduce 0.4 /
1.0 / 1.0, all-to-all 1.0; four such ranks on the two cores, 2 / 64 / 256 KiB: all-gather 0.6 / 0.7 / 0.75, all-reduce 0.35 / 0.35 / 1.0.

A wait blocks until the collective has finished or failed. It is not cut into slices: a point-to-point wait of gloo that times out closes
its connections, so it cannot be repeated. What wakes a rank that waits for a lost peer is `interrupt`, called from another thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshc.ir.functions import Function
from meshc.ir.reductions import REDUCTIONS

# torch 2.13 renamed these and warns about the names that 2.11 and 2.12 have.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PLAIN: Final = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8},
)
"""The dtypes that both gloo and NCCL move and reduce; any other travels as bytes."""

_TAG: Final = 5417
"""The tag of messages sent from here, apart from a user's own, whose default is 0."""
_INTERRUPT_TAG: Final = 5418

_EXCHANGE_BYTES: Final = 512 * 1024
"""Two gloo ranks all-reduce by exchanging whole tensors up to this size. The bytes are a ring's; above it the ring, which adds one piece
while the next arrives, is as fast."""

_SMALL_SUM: Final = 64 * 1024
_SMALL_PART: Final = 256 * 1024
"""Bytes of a rank up to which more than two gloo ranks send to all others at once: for an all-reduce (n / 2 times a ring's bytes; for one
number torch's is faster) and for an all-gather."""


class Waitable(Protocol):
    """A communication that can be waited for: torch's, or a `Work`."""

    def wait(self) -> object: ...


class CollectiveWork:
    """A pending collective and its result.

    `wait()` returns the result, any number of times. On CUDA it makes the current stream wait, not the host. It raises the backend's
    RuntimeError if the collective failed.
    """

    __slots__ = ("_finish", "_held", "_tensor", "_works")

    def __init__(
        self, tensor: Tensor, works: Sequence[Waitable] = (), finish: Callable[[], Tensor] | None = None, held: object = None
    ) -> None:
        self._tensor = tensor
        self._works = works
        self._finish = finish
        self._held = held  # what the communication reads, alive until it has been read

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        self._works = ()
        if self._finish is not None:
            self._tensor = self._finish()
            self._finish = None
        self._held = None
        return self._tensor

    def then(self, change: Callable[[Tensor], Tensor]) -> CollectiveWork:
        """The same communication, with `change` applied to its result when it is waited for."""
        return CollectiveWork(self._tensor, (self,), lambda: change(self._tensor))


def all_reduce(x: Tensor, group: ProcessGroup | None, op: str = "sum", *, out: Tensor | None = None) -> CollectiveWork:
    """The elementwise `op` (sum, max, min) of every rank's `x`, on every rank, bit for bit the same.

    `out` is a contiguous tensor like `x`, or `x` itself for in place; without it `x` is kept and the result is new (`x` itself in a group
    of one). bool takes max (any) and min (all).
    """
    if group is None:
        return CollectiveWork(x if out is None or out is x else out.copy_(x))
    _check_reduction(x, op)
    if _direct(x) and group.size() == 2 and x.nbytes <= _EXCHANGE_BYTES:
        mine = x.contiguous()
        return _reduce_pair(mine, mine, group, op, out)
    if _direct(x) and group.size() > 2 and x.numel() > 1 and x.nbytes <= _SMALL_SUM:
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        return _to_all(x, group).then(lambda stacked: _reduce(stacked.unbind(), op, result))
    result = x.clone(memory_format=torch.contiguous_format) if out is None else out if out is x else out.copy_(x)
    return CollectiveWork(result, (dist.all_reduce(_plain(result), _reduce_op(op), group, async_op=True),))


def all_gather(x: Tensor, group: ProcessGroup | None) -> CollectiveWork:
    """Every rank's `x`, one after another along dim 0 in the group's order. x: [a, ...] -> [n·a, ...]."""
    if group is None:
        return CollectiveWork(x)
    size, rank = group.size(), group.rank()
    x = x.contiguous()
    if _direct(x) and size > 2 and x.nbytes <= _SMALL_PART:
        return _to_all(x, group).then(lambda stacked: stacked.flatten(0, 1))
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    if not _direct(x) or size != 2:
        return CollectiveWork(out, (_all_gather(_plain(out), _plain(x), group, async_op=True),), held=x)
    parts = out.view(size, *x.shape)
    works = _exchange(x, parts[1 - rank], group)
    parts[rank].copy_(x)
    return CollectiveWork(out, works, held=x)


def numbers_of_ranks(mine: Sequence[int], device: torch.device, group: ProcessGroup | None) -> list[list[int]]:
    """The numbers of each rank of the group, which waits for all."""
    found: list[list[int]] = all_gather(torch.tensor([mine], dtype=torch.int64, device=device), group).wait().tolist()
    return found


def ring_shift(x: Tensor, steps: int, group: ProcessGroup | None) -> CollectiveWork:
    """Sends `x` to the rank `steps` places on, round the ring; the result is the tensor of the rank `steps` places before, of x's shape."""
    if group is None:
        return CollectiveWork(x)
    size, rank = group.size(), group.rank()
    return _one_message(x, (rank + steps) % size, (rank - steps) % size, group)


def exchange_halves(x: Tensor, dim: int, group: ProcessGroup | None, home: bool) -> CollectiveWork:
    """The rank's tile in zigzag order (`meshc/ir/sharding.py`), from its tile in natural order; with `home` the reverse. The second half is
    exchanged with the rank at the mirrored place of the group."""
    if group is None:
        return CollectiveWork(x)
    size, there = x.shape[dim], group.size() - 1 - group.rank()
    behind = there < group.rank()  # in zigzag order, what the tile begins with is behind what comes
    moves = size // 2
    kept, sent = x.narrow(dim, 0, size - moves), x.narrow(dim, size - moves, moves)
    if home and behind:
        sent, kept = x.narrow(dim, 0, moves), x.narrow(dim, moves, size - moves)
    return _one_message(sent, there, there, group).then(lambda came: torch.cat([came, kept] if behind and not home else [kept, came], dim))


def _one_message(x: Tensor, to: int, source: int, group: ProcessGroup) -> CollectiveWork:
    """Sends `x` to one rank of the group and receives a tensor of its shape from another; every rank sends one and receives one. (Gloo's
    all-to-all waits for all ranks, also for those without a message.)"""
    x = x.contiguous()
    found = torch.empty_like(x)
    if _direct(x) and group.size() > 2:
        if to == group.rank():
            return CollectiveWork(found.copy_(x))
        arrives, goes = receive_all([found], group, source), send_all([x], group, to)
        return CollectiveWork(found, (*arrives, *goes), held=x)
    mine, theirs = _flat(x), _flat(found)
    sends, receives = [0] * group.size(), [0] * group.size()
    sends[to] = receives[source] = mine.numel()
    return CollectiveWork(found, (dist.all_to_all_single(theirs, mine, receives, sends, group, async_op=True),), held=x)


def broadcast(x: Tensor, group: ProcessGroup | None, source: int = 0) -> CollectiveWork:
    """Overwrites `x` with that of the rank at place `source` of the group; `x` is contiguous."""
    if group is None:
        return CollectiveWork(x)
    return CollectiveWork(x, (dist.broadcast(_plain(x), group=group, group_src=source, async_op=True),))


def _require_work(work: Waitable | None) -> tuple[Waitable]:
    assert work is not None  # torch gives none to a rank that is not of the group
    return (work,)


def send(x: Tensor, group: ProcessGroup, to: int) -> CollectiveWork:
    """Sends `x` to the rank at place `to`; messages between two ranks arrive in the order sent. Waiting returns what was sent."""
    x = x.contiguous()
    return CollectiveWork(x, _require_work(dist.isend(_plain(x), group=group, group_dst=to, tag=_TAG)))


def recv(out: Tensor, group: ProcessGroup, source: int) -> CollectiveWork:
    """Receives into `out`, which is contiguous, from the rank at place `source`."""
    return CollectiveWork(out, _require_work(dist.irecv(_plain(out), group=group, group_src=source, tag=_TAG)))


def send_all(values: Sequence[Tensor], group: ProcessGroup, to: int) -> list[CollectiveWork]:
    """Sends several tensors to the rank at place `to`, at once where the backend can. The other side calls `receive_all` in turn."""
    return _post(dist.isend, [value.contiguous() for value in values], group, to)


def receive_all(into: Sequence[Tensor], group: ProcessGroup, source: int) -> list[CollectiveWork]:
    """Receives what `send_all` sent, into contiguous tensors of the same shapes and dtypes."""
    return _post(dist.irecv, into, group, source)


def _post(how: Function, tensors: Sequence[Tensor], group: ProcessGroup, peer: int) -> list[CollectiveWork]:
    full = [x for x in tensors if x.numel()]
    if not full or _direct(full[0]):
        place = "group_dst" if how is dist.isend else "group_src"
        return [CollectiveWork(x, (how(_plain(x), group=group, tag=_TAG, **{place: peer}),) if x.numel() else ()) for x in tensors]
    works = dist.batch_isend_irecv([dist.P2POp(how, _plain(x), group=group, group_peer=peer) for x in full])
    return [CollectiveWork(x, tuple(works) if x.numel() else ()) for x in tensors]


def gather_dim(x: Tensor, dim: int, group: ProcessGroup | None) -> CollectiveWork:
    """`all_gather` along any dim: [..., a, ...] -> [..., n·a, ...]. One local copy, none when no dim before `dim` is larger than 1."""
    if group is None:
        return CollectiveWork(x)
    dim %= x.ndim
    work = all_gather(x.contiguous().unsqueeze(0), group)
    return work.then(lambda stacked: _merge(stacked, dim))


def scatter_dim(x: Tensor, dim: int, group: ProcessGroup | None, op: str = "sum") -> CollectiveWork:
    """This rank's part, along a dim, of the elementwise `op` of every rank's `x`: [..., n·a, ...] -> [..., a, ...]. The parts sent are
    copied once, none as `gather_dim` says."""
    if group is None:
        return CollectiveWork(x)
    parts = _split_parts(x, dim, group.size())
    _check_reduction(x, op)
    if _direct(x):
        return _reduce_parts(parts, group, op)
    parts = parts.contiguous()
    out = torch.empty_like(parts[0])
    return CollectiveWork(out, (_reduce_scatter(_plain(out), _plain(parts), _reduce_op(op), group, async_op=True),), held=parts)


def all_to_all_dims(x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup | None) -> CollectiveWork:
    """Moves a split from `concat_dim` to `split_dim`. [.., n·a, .., b, ..] -> [.., a, .., n·b, ..]; two copies at most."""
    if group is None:
        return CollectiveWork(x)
    concat_dim %= x.ndim
    parts = _split_parts(x, split_dim, group.size())
    stacked = torch.empty_like(parts, memory_format=torch.contiguous_format)
    return _swap(parts, stacked, group).then(lambda stacked: _merge(stacked, concat_dim))


def all_to_all_pieces(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: ProcessGroup) -> CollectiveWork:
    """Sends pieces[i] to rank i, whatever its shape; the result is the received pieces, flat, one of shapes[i] from rank i."""
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    return all_to_all_rows(sent, [piece.numel() for piece in pieces], [math.prod(shape) for shape in shapes], group)


def split_pieces(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The pieces of these shapes, which follow one another in `flat`."""
    return [piece.view(*shape) for piece, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)]


def all_to_all_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup) -> CollectiveWork:
    """The next sends[i] along dim 0 of `x` go to rank i; waiting gives receives[i] from rank i, one after another. [a, ..] -> [b, ..]"""
    found = x.new_empty((sum(receives), *x.shape[1:]))
    unit = math.prod(x.shape[1:]) * (1 if x.dtype in _PLAIN else x.element_size())  # as bytes
    goes, comes = [count * unit for count in sends], [count * unit for count in receives]
    x = x.contiguous()
    return CollectiveWork(found, (dist.all_to_all_single(_flat(found), _flat(x), comes, goes, group, async_op=True),), held=x)


def waits_on_device(group: ProcessGroup | None) -> bool:
    """Whether a wait on the group (None: all ranks) holds up a CUDA stream and not the host."""
    return "nccl" in dist.get_backend_config(group)


def interrupt(group: ProcessGroup) -> None:
    """Makes every wait of this process on the group raise, now and from now on; may be called from any thread.

    The peers' connections to this rank close, so their waits raise too. The group is lost: this is for failures only.
    """
    try:
        backends = dist.get_backend_config(group)
        if "nccl" in backends:
            group.abort()
        if "gloo" in backends:
            # gloo has no abort that wakes a wait, but a receive that times out closes all connections of its group, which does.
            peer = (group.rank() + 1) % group.size()
            work = dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=peer, tag=_INTERRUPT_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
    except (RuntimeError, TypeError, ValueError):
        pass  # it has timed out, or the group was lost or destroyed already, of which torch says so by a TypeError


def _direct(x: Tensor) -> bool:
    """Whether this file's own algorithms are used, rather than the backend's."""
    return x.device.type == "cpu"


def _exchange(mine: Tensor, theirs: Tensor, group: ProcessGroup) -> Sequence[Waitable]:
    """In a group of two: sends `mine`, receives `theirs`."""
    amounts = [0, 0]
    theirs, mine = _flat(theirs), _flat(mine)
    amounts[1 - group.rank()] = mine.numel()
    return (dist.all_to_all_single(theirs, mine, amounts, amounts, group, async_op=True),)


def _swap(parts: Tensor, stacked: Tensor, group: ProcessGroup) -> CollectiveWork:
    """parts[i] goes to rank i; rank i's comes to stacked[i]."""
    if _direct(parts) and group.size() == 2:
        rank = group.rank()
        mine = parts[1 - rank].contiguous()
        works = _exchange(mine, stacked[1 - rank], group)
        stacked[rank].copy_(parts[rank])
        return CollectiveWork(stacked, works, held=mine)
    mine = parts.contiguous()
    return CollectiveWork(stacked, (dist.all_to_all_single(_flat(stacked), _flat(mine), group=group, async_op=True),), held=mine)


def _to_all(x: Tensor, group: ProcessGroup) -> CollectiveWork:
    """Sends `x` to every rank; the result is all ranks' tensors, [n, ..]."""
    sent = x.unsqueeze(0).expand(group.size(), *x.shape).contiguous()
    stacked = torch.empty_like(sent)
    return CollectiveWork(stacked, (dist.all_to_all_single(_flat(stacked), _flat(sent), group=group, async_op=True),), held=sent)


def _reduce_pair(sent: Tensor, mine: Tensor, group: ProcessGroup, op: str, out: Tensor | None = None) -> CollectiveWork:
    """In a group of two: the reduction of `mine` with what the other rank sends."""
    theirs = torch.empty_like(sent)
    terms = (theirs, mine) if group.rank() else (mine, theirs)
    return CollectiveWork(theirs, _exchange(sent, theirs, group), lambda: _reduce(terms, op, theirs if out is None else out), held=sent)


def _reduce_parts(parts: Tensor, group: ProcessGroup, op: str) -> CollectiveWork:
    """The reduction over ranks of their parts[this rank]; terms are added in the group's order, whichever rank adds."""
    if group.size() == 2:
        parts = parts.contiguous()  # of one memory, and where it is a copy, what was given may go
        return _reduce_pair(parts[1 - group.rank()], parts[group.rank()], group, op)
    stacked = torch.empty_like(parts, memory_format=torch.contiguous_format)
    result = torch.empty_like(stacked[0])
    return CollectiveWork(stacked, (_swap(parts, stacked, group),), lambda: _reduce(stacked.unbind(), op, result))


def _reduce(terms: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
    combine = REDUCTIONS[op].combine
    combine(terms[0], terms[1], out=out)
    for term in terms[2:]:
        combine(out, term, out=out)
    return out


def _split_parts(x: Tensor, dim: int, size: int) -> Tensor:
    """[..., n·a, ...] -> [n, ..., a, ...], a view."""
    dim %= x.ndim
    if x.shape[dim] % size:
        raise ValueError(f"dim {dim} of shape {tuple(x.shape)} does not split into {size} equal parts")
    return x.unflatten(dim, (size, -1)).movedim(dim, 0)


def _merge(stacked: Tensor, dim: int) -> Tensor:
    """[n, ..., a, ...] -> [..., n·a, ...], contiguous; a view when all dims between are of size 1."""
    if math.prod(stacked.shape[1 : dim + 1]) != 1:
        stacked = stacked.movedim(0, dim)
        return stacked.flatten(dim, dim + 1).contiguous()
    shape = list(stacked.shape[1:])
    shape[dim] *= stacked.shape[0]
    return stacked.reshape(shape)


def _plain(x: Tensor) -> Tensor:
    """`x`, contiguous, under a dtype that travels: a view of the same memory."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous")
    return x if x.dtype in _PLAIN else x.view(-1).view(torch.uint8)


def _flat(x: Tensor) -> Tensor:
    return _plain(x).view(-1)


def _reduce_op(op: str) -> dist.ReduceOp.RedOpType:
    return getattr(dist.ReduceOp, op.upper())


def _check_reduction(x: Tensor, op: str) -> None:
    if x.dtype not in _PLAIN and not (x.dtype is torch.bool and REDUCTIONS[op].opposite):
        raise TypeError(f"{op} over ranks of {x.dtype}: cast it first; bool takes max and min, the 8-bit floats only travel")
