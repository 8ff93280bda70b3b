"""Guard around torch's collectives on a compiled model's DTensors: names the rank that does not take part.

    weight[3].zero_()      weight.full_tensor()      clip_grad_norm_(model.parameters(), 1.0)
              │ torch gathers, or sums, along some axes
    noted in the stream of changes of the ranks along these axes (`changes.py`), and run under the board's guard

A rank alone in a collective, as under `if rank == 0`, would wait in torch for ever. If the others run a program meanwhile, their streams
differ, and all ranks raise with the tensor and what to do; if they do something else, they are named after a timeout; if they have ended,
the waiting rank ends too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from meshc.private import dtensor_dispatch, dtensor_redistribute
from meshc.replacements import replace_for_good
from meshc.runtime.failure.failed_rank import current_board
from meshc.runtime.failure.peers import AwaitedRanks
from meshc.runtime.failure.step_numbers import CHANGES
from meshc.runtime.state import random_draws
from meshc.runtime.state.changes import EXCHANGED, other_change


def follow() -> None:
    """Installs the guard: for redistributions of operands, and for those that a user requests."""
    modules: tuple[tuple[str, Any], ...] = (("operand_exchange", dtensor_dispatch), ("asked_exchange", dtensor_redistribute))
    for name, module in modules:
        if not hasattr(module.redistribute_local_tensor, "noted"):
            replace_for_good(name, _note_exchange(module.redistribute_local_tensor))


def _note_exchange(exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def exchange_with_note(local: Tensor, current: Any, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        board, axes = current_board(), _sent_along(current, target)
        beside = threading.current_thread() is not threading.main_thread()
        if board is None or not axes or type(local) is not Tensor or random_draws.home_of(current.mesh) is None or beside:
            return exchange(local, current, target, *args, **kwargs)
        ranks = _ranks_along(current.mesh, axes)
        names = ", ".join(str((current.mesh.mesh_dim_names or range(current.mesh.ndim))[axis]) for axis in axes)
        what = f"a tensor of shape {list(current.shape)} over {names}"
        stream = board.numbers.joint(CHANGES, ranks, other_change)
        for _, each in board.numbers.joint_streams(CHANGES, ranks):
            each.note((what,), (EXCHANGED,))
        before = board.awaited
        board.awaited = AwaitedRanks(frozenset(ranks) - {board.rank}, f"the exchange of {what}", (stream.name, stream.count))
        try:
            with board.guard(board.step, f"exchange {what}"):
                return exchange(local, current, target, *args, **kwargs)
        finally:
            board.awaited = before

    exchange_with_note.__dict__["noted"] = True
    return exchange_with_note


def _sent_along(current: Any, target: Any) -> tuple[int, ...]:
    """The mesh dims along which ranks send; where the tensor is replicated, none does."""
    pairs = zip(current.placements, target.placements, strict=True)
    moved = (axis for axis, (one, other) in enumerate(pairs) if one != other and type(one) is not Replicate)
    return tuple(axis for axis in moved if current.mesh.size(axis) > 1)


@lru_cache(maxsize=256)
def _ranks_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one along these axes only."""
    here = mesh.get_coordinate()
    assert here is not None  # a rank outside the mesh has nothing to send
    place = tuple(slice(None) if axis in axes else at for axis, at in enumerate(here))
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))
