"""Operators of 8-bit block-wise quantization: a code per element, a float32 scale per block of 256 along the last dim.

    scale = meshc.block_scale(value, global_shape, local_shape, offsets, last)          the largest magnitude of each block
    codes = meshc.encode_state(codes, value, scale, seed_step, "w/exp_avg", signed, global_shape, local_shape, offsets, last)     by a draw
    value = meshc.decode_state(codes, scale, signed, float32, global_shape, local_shape, offsets, last)

Blocks are counted on global indices, so that a scale does not depend on the sharding: where a block is split over ranks, each computes the
largest magnitude of its part, and the scale is the maximum of these. `last`: the number of the tile's dims that form the value's last dim.

The map is dynamic (Dettmers, Lewis, Shleifer, Zettlemoyer: "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, section 2):
seven decades, of which each has half as many steps as the one above. docs/memory.md has its numbers, docs/randomness.md its draws.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from meshc.ops import philox
from meshc.ops.definition import misfit, register_kernel
from meshc.ops.state_rounding import call_named, define
from meshc.ops.tile import tile_of

Shape = Sequence[int]
BLOCK: Final = 256
"""Elements per scale."""

DECADES: Final = 7
WORKED: Final = 1 << 16
"""Elements that are encoded or decoded at a time on a CPU; the temporaries are a few bytes per element."""

WORKED_CUDA: Final = 1 << 24
_TILE = "SymInt[] global_shape, SymInt[] local_shape, SymInt[] offsets, int last"


@cache
def magnitudes(signed: bool) -> Tensor:
    """float32 [128] or [255], ascending: 0, and of each decade e, 10^-e * (0.1 + 0.9 * i / n), i = 1 ... n, with n = 64 (signed) or 128
    for e = 0, half of it for e = 1, and so on. The largest is 1."""
    finest = 6 if signed else 7
    found = [0.0]
    for decade in reversed(range(DECADES)):
        steps = 2 ** (finest - decade)
        found += [10.0**-decade * (0.1 + 0.9 * i / steps) for i in range(1, steps + 1)]
    return torch.tensor(found, dtype=torch.float64).to(torch.float32)


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """float32 [256]: the value of each code, in units of its scale. Signed, the code of -x is that of x plus 128. Codes that are never
    written (128, and 255 unsigned) have value 0."""
    known = magnitudes(signed)
    found = torch.zeros(256)
    found[: len(known)] = known
    if signed:
        found[128:] = -known
    return found.to(device)


def scale_shape(shape: Shape) -> tuple[int, ...]:
    """Shape of the scales of a value of `shape`."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def code_of(sign: float, signed: bool) -> int:
    """Code of 0 (`sign` 0), or of a block's largest magnitude with this sign."""
    return 0 if sign == 0 else len(magnitudes(signed)) - 1 + (128 if sign < 0 else 0)


def encode(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a full value, rounded to the nearest code; a decoded value gives back its codes."""
    tile = list(value.shape), list(value.shape), [0] * value.dim()
    scale = torch.ops.meshc.block_scale(value, *tile, 1)
    codes = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    _write_codes(codes, value, scale, signed, None, _blocks(codes, scale, *tile, 1))
    return codes, scale


def encode_by_draw(value: Tensor, signed: bool, seed_step: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a full value by stochastic rounding, as in an update."""
    tile = list(value.shape), list(value.shape), [0] * value.dim()
    scale = torch.ops.meshc.block_scale(value, *tile, 1)
    codes = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    return torch.ops.meshc.encode_state(codes, value, scale, seed_step, name, signed, *tile, 1), scale


def decode(codes: Tensor, scale: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    """The full value of codes and scales."""
    tile = list(codes.shape), list(codes.shape), [0] * codes.dim()
    return torch.ops.meshc.decode_state(codes, scale, signed, dtype, *tile, 1)


# ------------------------------------------------------------------------------------------------------------------ kernels


def _blocks(value: Tensor, scale: Tensor, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int) -> Tensor:
    """int64 [columns]: the block of each column of a tile; padding counts to the last one."""
    tile = tile_of(*(entries[len(entries) - last :] for entries in (global_shape, local_shape, offsets)))
    columns = torch.full((1,), tile.base)
    for size, stride in zip(tile.sizes, tile.strides, strict=True):
        columns = (columns[:, None] + torch.arange(size) * stride).flatten()
    return (columns // BLOCK).clamp_(max=scale.shape[-1] - 1).to(value.device)


def _parts(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Slices of rows that are processed at a time."""
    each = max(1, (WORKED if device.type == "cpu" else WORKED_CUDA) // max(1, columns))
    return [slice(begin, min(begin + each, rows)) for begin in range(0, rows, each)]


def _block_scale(value: Tensor, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int) -> Tensor:
    """Largest magnitude of each block in float32; infinity for NaN, so that the maximum over ranks is infinite too."""
    out = _block_scale_fake(value, global_shape, local_shape, offsets, last).zero_()
    columns, blocks = value.shape[-1], out.shape[-1]
    flat, found = value.reshape(-1, columns), out.view(-1, blocks)
    of = _blocks(value, out, global_shape, local_shape, offsets, last)
    plain = columns % BLOCK == 0 and last == 1 and int(offsets[-1]) % BLOCK == 0 and int(offsets[-1]) + columns <= blocks * BLOCK
    for part in _parts(len(flat), columns, value.device):
        sizes = flat[part].to(torch.float32).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
        if plain:
            begin = int(offsets[-1]) // BLOCK
            found[part, begin : begin + columns // BLOCK] = sizes.view(len(sizes), -1, BLOCK).amax(-1)
        else:
            found[part].scatter_reduce_(1, of.expand_as(sizes), sizes, "amax")
    return out


def _encode_state(
    codes: Tensor, value: Tensor, scale: Tensor, seed_step: Tensor, name: str, signed: bool,
    global_shape: Shape, local_shape: Shape, offsets: Shape, last: int,
) -> None:  # fmt: skip
    _fit_encoding(codes, value, scale, seed_step, name, signed, global_shape, local_shape, offsets, last)
    tile = tile_of(global_shape, local_shape, offsets)
    drawn = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    philox.draw("uniform32", tile, drawn, seed_step=seed_step, call=call_named(name))
    _write_codes(codes, value, scale, signed, drawn, _blocks(codes, scale, global_shape, local_shape, offsets, last))


def _write_codes(codes: Tensor, value: Tensor, scale: Tensor, signed: bool, drawn: Tensor | None, of: Tensor) -> None:
    """Write `codes` in place. A magnitude between two codes is rounded up with the probability of its distance from the lower, or, without
    `drawn`, to the nearer one; unsigned, a value that is not 0 never becomes 0: Adam would divide by nearly nothing."""
    known = magnitudes(signed).to(codes.device)
    columns = codes.shape[-1]
    flat = [None if one is None else one.reshape(-1, columns) for one in (value, drawn)]
    scales = scale.reshape(-1, scale.shape[-1])
    out = codes if codes.is_contiguous() else torch.empty_like(codes, memory_format=torch.contiguous_format)
    native = philox.library() if codes.device.type == "cpu" else None
    rows = codes.numel() // max(1, columns)
    at_once = native is not None and value.dtype == torch.float32 and value.is_contiguous()
    for part in [slice(0, rows)] if at_once else _parts(rows, columns, codes.device):
        given, random = (None if one is None else one[part] for one in flat)
        assert given is not None
        if native is not None:
            _encode_natively(native, out.view(-1, columns)[part], given.to(torch.float32).contiguous(), scales[part], random, signed, of)
            continue
        wide = (given.to(torch.float32) / scales[part].index_select(1, of)).nan_to_num_(0.0)  # 0 / 0, and non-finite blocks
        size = (wide.abs() if signed else wide.clamp(min=0.0)).clamp_(max=1.0)
        lower = torch.searchsorted(known, size, right=True, out_int32=True).sub_(1).clamp_(max=len(known) - 2)
        below = known.index_select(0, lower.flatten()).view_as(size)
        above = known.index_select(0, (lower + 1).flatten()).view_as(size)
        share = (size - below) / (above - below)
        code = lower + (share > 0.5 if random is None else random < share)
        if signed:
            code += ((wide < 0) & (code > 0)) * 128
        else:
            code += (wide > 0) & (code == 0)
        out.view(-1, columns)[part] = code.to(torch.uint8)
    if out is not codes:
        codes.copy_(out)


@cache
def _first(signed: bool) -> Tensor:
    """uint8 [0x3F81]: for the upper 16 bits of a float32 in [0, 1], the code of a magnitude not above it."""
    sizes = (torch.arange(0x3F81, dtype=torch.int32) << 16).view(torch.float32)
    known = magnitudes(signed)
    return (torch.searchsorted(known, sizes, right=True) - 1).clamp_(max=len(known) - 2).to(torch.uint8)


def _encode_natively(
    native: ctypes.CDLL, codes: Tensor, value: Tensor, scales: Tensor, drawn: Tensor | None, signed: bool, of: Tensor
) -> None:
    """Write rows of codes in place, by philox.cpp."""
    known, scales, of = magnitudes(signed), scales.contiguous(), of.contiguous()
    pointers = [one.data_ptr() for one in (of, known, _first(signed))]
    random = None if drawn is None else drawn.contiguous()
    refused = native.meshc_encode(
        value.data_ptr(), scales.data_ptr(), None if random is None else random.data_ptr(), *pointers, len(known), *value.shape,
        scales.shape[-1], int(signed), codes.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if refused:
        raise misfit("encode_state", "the kernel does not take these operands", codes=codes, value=value, scale=scales)


def _decode_state(
    codes: Tensor, scale: Tensor, signed: bool, dtype: torch.dtype, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int
) -> Tensor:
    out = _decode_state_fake(codes, scale, signed, dtype, global_shape, local_shape, offsets, last)
    columns = codes.shape[-1]
    known = _values(signed, codes.device)
    of = _blocks(codes, scale, global_shape, local_shape, offsets, last)
    flat, scales, found = codes.reshape(-1, columns), scale.reshape(-1, scale.shape[-1]), out.view(-1, columns)
    for part in _parts(len(flat), columns, codes.device):
        given = flat[part]
        found[part] = known.index_select(0, given.to(torch.int32).flatten()).view(given.shape) * scales[part].index_select(1, of)
    return out


# ------------------------------------------------------------------------------------------------------------------ what fits


def _fit_tile(name: str, value: Tensor, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int) -> None:
    if not len(global_shape) == len(local_shape) == len(offsets) or not 1 <= last <= len(local_shape) or value.dim() < 1:
        raise ValueError(
            f"meshc::{name}: global shape {global_shape}, local shape {local_shape} and offsets {offsets} are of one length, at least 1, "
            f"and {last} of them are the last dim of a value with {value.dim()}"
        )
    if math.prod(local_shape) != value.numel() or math.prod(local_shape[len(local_shape) - last :]) != value.shape[-1]:
        raise misfit(name, f"the tile {list(local_shape)}, of which {last} are the last dim, has the value's elements", value=value)


def _fit_codes(name: str, codes: Tensor, scale: Tensor, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int) -> None:
    _fit_tile(name, codes, global_shape, local_shape, offsets, last)
    blocks = -(-math.prod(global_shape[len(global_shape) - last :]) // BLOCK)
    if codes.dtype != torch.uint8 or scale.dtype != torch.float32 or scale.device != codes.device:
        raise misfit(name, "codes in uint8, with scales in float32 beside them", codes=codes, scale=scale)
    if tuple(scale.shape) != (*codes.shape[:-1], blocks):
        raise misfit(name, f"a scale for each row of codes and each of {blocks} blocks", codes=codes, scale=scale)


def _fit_encoding(
    codes: Tensor, value: Tensor, scale: Tensor, seed_step: Tensor, name: str, signed: bool,
    global_shape: Shape, local_shape: Shape, offsets: Shape, last: int,
) -> None:  # fmt: skip
    _fit_codes("encode_state", codes, scale, global_shape, local_shape, offsets, last)
    if value.shape != codes.shape or value.device != codes.device or value.dtype not in (torch.float32, torch.float64):
        raise misfit("encode_state", "a value in float32 or float64 of the shape of its codes", codes=codes, value=value)
    if seed_step.dtype != torch.int64 or seed_step.shape != (2,) or seed_step.device != codes.device:
        raise misfit("encode_state", "seed_step is int64 [2], where the codes lie", seed_step=seed_step, codes=codes)


def _block_scale_fake(value: Tensor, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int) -> Tensor:
    _fit_tile("block_scale", value, global_shape, local_shape, offsets, last)
    if not value.is_floating_point():
        raise misfit("block_scale", "a floating value", value=value)
    blocks = -(-math.prod(global_shape[len(global_shape) - last :]) // BLOCK)
    return torch.empty((*value.shape[:-1], blocks), dtype=torch.float32, device=value.device)


def _decode_state_fake(
    codes: Tensor, scale: Tensor, signed: bool, dtype: torch.dtype, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int
) -> Tensor:
    _fit_codes("decode_state", codes, scale, global_shape, local_shape, offsets, last)
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


# ------------------------------------------------------------------------------------------------------------------ registration

register_kernel(f"block_scale(Tensor value, {_TILE}) -> Tensor", _block_scale, _block_scale_fake)
_DECODED = f"decode_state(Tensor codes, Tensor scale, bool signed, ScalarType dtype, {_TILE}) -> Tensor"
register_kernel(_DECODED, _decode_state, _decode_state_fake)
define(
    "encode_state", "codes", f"Tensor value, Tensor scale, Tensor seed_step, str name, bool signed, {_TILE}", _encode_state, _fit_encoding
)
