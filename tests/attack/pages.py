"""Tensors between pages that nobody may touch: a kernel that reads or writes past an operand ends its process there and then.

    | no access | ........ the tensor | no access |        `at_end`: what follows the last element cannot be read
    | no access | the tensor ........ | no access |        otherwise: what stands before the first one
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PAGE = mmap.PAGESIZE


class Fenced:
    """Makes such tensors; `close` gives their memory back, after which none of them may be used."""

    def __init__(self) -> None:
        self._mapped: list[tuple[int, int]] = []

    def tensor(self, like: Tensor, at_end: bool = True) -> Tensor:
        """A copy of a strided tensor, its strides kept; one that shares memory with itself is laid out densely."""
        storage = like.untyped_storage()
        dense = like.contiguous() if storage.nbytes() != like.nbytes or like.storage_offset() else like
        if dense.numel() == 0:
            return dense
        flat = torch.as_strided(dense, (dense.numel(),), (1,))
        size = dense.nbytes
        room = -(-size // PAGE) * PAGE
        base = _LIBC.mmap(None, room + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError("mmap")
        self._mapped.append((base, room + 2 * PAGE))
        for edge in (base, base + PAGE + room):
            if _LIBC.mprotect(edge, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        start = base + PAGE + (room - size if at_end else 0)
        memory = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=torch.uint8)
        memory.copy_(flat.view(torch.uint8) if dense.dtype != torch.uint8 else flat)
        return torch.as_strided(memory.view(dense.dtype), dense.shape, dense.stride())

    def close(self) -> None:
        for base, size in self._mapped:
            _LIBC.munmap(base, size)
        self._mapped.clear()
