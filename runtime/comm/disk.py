"""Tensors in memory-mapped files on the host's disk (`offload state: disk`), and the function that copies to each offload tier.

    MESHC_DISK=/nvme    each tile is a file in that folder, mapped into memory: a copy to it writes, a copy from it reads, and the system
                        decides what of it is in memory meanwhile

A file is unlinked as soon as it is created, so that nothing is left when the process ends, however it ends; its blocks are allocated then,
so that no later write finds the disk full. The bytes have a counter of their own (`HELD`).
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

from meshc import environment
from meshc.errors import StateError
from meshc.ir.storage_moves import Storage
from meshc.runtime.comm import host

HELD: Final = host.PoolUsage()
"""Bytes of this process's files."""


def empty(shape: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
    """A new contiguous tensor in a file. `what` names the tensor in messages. Raises StateError if the folder has no room."""
    size = prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    folder = environment.disk_folder()
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="meshc-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            block = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise StateError(_no_room(folder, size, what, error)) from error
    return host.mapped_tensor(block, shape, dtype, HELD)


def copy_to_disk(tensor: Tensor, what: str) -> Tensor:
    """A copy of `tensor` in a file."""
    return empty(tensor.shape, tensor.dtype, what).copy_(tensor)


COPIES: Final[Mapping[Storage, Callable[[Tensor, str, torch.device], Tensor]]] = {
    "host": lambda tensor, what, device: host.copy_to_host(tensor, device),
    "disk": lambda tensor, what, device: copy_to_disk(tensor, what),
}
"""By tier, the copy of a tensor, which `what` names in messages, to where a rank with this device stores it."""


def _no_room(folder: os.PathLike[str], size: int, what: str, error: OSError) -> str:
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        why = f"{folder} has no room for {size:,} bytes more: {shutil.disk_usage(folder).free:,} are free, and {HELD.now:,} have been taken"
    return (
        f"{what} cannot lie on the disk\n  why: {why}\n"
        f"  what to do: {environment.DISK}=FOLDER, on a disk with room for all state of this machine's ranks; or `offload state`, which\n"
        "  keeps it in the host's memory"
    )
