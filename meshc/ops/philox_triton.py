"""The CUDA kernel of meshc's random numbers: the arithmetic of philox.cpp, one program a run of elements, in Triton.

Bit-equal by construction: integers, and IEEE + - * / sqrt with fusion of multiply and add switched off. Nothing is read on the host, so a
CUDA graph may hold it; seed and step are loaded on the device. Imported only where a CUDA tensor is drawn.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshc.ops.tile import Tile

UNIFORM32, UNIFORM64, NORMAL32, NORMAL64, MASK, DROPOUT32, DROPOUT64, BACKWARD32, BACKWARD64 = (tl.constexpr(kind) for kind in range(9))
DIMS = 6
BLOCK = 1024


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _wide(high, low):  # type: ignore[no-untyped-def]
    return (high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)


@triton.jit
def _normal32(a, b, odd):  # type: ignore[no-untyped-def]
    pattern = (a + 1).to(tl.float32).to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    e = ((pattern >> 23) - (127 + 24)).to(tl.float32)
    f = ((pattern & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    tail = z * (((2.4279078841e-01 * z + 2.8498786688e-01) * z + 4.0000972152e-01) * z + 6.6666662693e-01)
    half = (f * f) * 0.5
    ln = e * 6.9313812256e-01 - ((half - (s * (half + tail) + e * 9.0580006145e-06)) - f)
    turn = (b - (odd << 22)) & 0xFFFFFF
    quarter = ((turn + 0x200000) >> 22) & 3
    rest = turn - (quarter << 22)
    rest = tl.where(rest >= 0x800000, rest - 0x1000000, rest)
    angle = rest.to(tl.float32) * (6.283185307179586 / 16777216.0)
    q = angle * angle
    sine = angle + (angle * q) * ((-1.9515295891e-4 * q + 8.3321608736e-3) * q + -1.6666654611e-1)
    cosine = (1.0 - q * 0.5) + (q * q) * ((2.443315711809948e-5 * q + -1.388731625493765e-3) * q + 4.166664568298827e-2)
    c = tl.where((quarter & 1) == 1, sine, cosine)
    return tl.sqrt_rn(ln * -2.0) * tl.where(((quarter + 1) & 2) == 2, -c, c)


@triton.jit
def _f64(value: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.full((), value, tl.float64)


@triton.jit
def _normal64(a, b, odd):  # type: ignore[no-untyped-def]
    pattern = (a + 1).to(tl.float64).to(tl.int64, bitcast=True) + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
    e = ((pattern >> 52) - (1023 + 53)).to(tl.float64)
    f = ((pattern & 0xFFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    tail = z * _f64(1.479819860511658591e-01) + _f64(1.531383769920937332e-01)
    tail = tail * z + _f64(1.818357216161805012e-01)
    tail = tail * z + _f64(2.222219843214978396e-01)
    tail = tail * z + _f64(2.857142874366239149e-01)
    tail = tail * z + _f64(3.999999999940941908e-01)
    tail = z * (tail * z + _f64(6.666666666666735130e-01))
    half = (f * f) * 0.5
    ln = e * _f64(6.93147180369123816490e-01) - ((half - (s * (half + tail) + e * _f64(1.90821492927058770002e-10))) - f)
    one = tl.full((), 1, tl.int64)
    turn = (b - (odd << 51)) & ((one << 53) - 1)
    quarter = ((turn + (one << 50)) >> 51) & 3
    rest = turn - (quarter << 51)
    rest = tl.where(rest >= (one << 52), rest - (one << 53), rest)
    angle = rest.to(tl.float64) * _f64(6.283185307179586 / 9007199254740992.0)
    q = angle * angle
    sine = q * _f64(1.58969099521155010221e-10) + _f64(-2.50507602534068634195e-08)
    sine = sine * q + _f64(2.75573137070700676789e-06)
    sine = sine * q + _f64(-1.98412698298579493134e-04)
    sine = sine * q + _f64(8.33333333332248946124e-03)
    sine = angle + (angle * q) * (sine * q + _f64(-1.66666666666666324348e-01))
    cosine = q * _f64(-1.13596475577881948265e-11) + _f64(2.08757232129817482790e-09)
    cosine = cosine * q + _f64(-2.75573143513906633035e-07)
    cosine = cosine * q + _f64(2.48015872894767294178e-05)
    cosine = cosine * q + _f64(-1.38888888888741095749e-03)
    cosine = (1.0 - q * 0.5) + (q * q) * (cosine * q + _f64(4.16666666666666019037e-02))
    c = tl.where((quarter & 1) == 1, sine, cosine)
    return tl.sqrt(ln * -2.0) * tl.where(((quarter + 1) & 2) == 2, -c, c)


@triton.jit(do_not_specialize=["call", "base", "threshold", "elements", "n1", "n2", "n3", "n4", "n5", "s0", "s1", "s2", "s3", "s4", "s5"])
def _kernel(  # type: ignore[no-untyped-def]
    seed_step, x, out, mask, call, base, threshold, elements, n1, n2, n3, n4, n5, s0, s1, s2, s3, s4, s5,
    KIND: tl.constexpr, QUADS: tl.constexpr, DIMS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Element i of the tile has coordinates by division with n5, n4, ...; its global index is base + sum of coordinate * stride.

    QUADS: rows are multiples of four long and start at multiples of four, so that one counter serves four neighbours.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    inside = i < elements
    if KIND == BACKWARD32 or KIND == BACKWARD64:
        grad = tl.load(x + i, inside)
        keep = tl.load(mask + i, inside).to(tl.int1)
        wide = grad.to(tl.float32) if KIND == BACKWARD32 else grad
        scale = tl.full((), SCALE, tl.float32 if KIND == BACKWARD32 else tl.float64)
        tl.store(out + i, tl.where(keep, wide * scale, 0.0).to(grad.dtype), inside)
    else:
        element = start + 4 * tl.arange(0, BLOCK // 4) if QUADS else i
        g = tl.zeros_like(element) + base
        if DIMS > 5:
            g += (element % n5) * s5
            element = element // n5
        if DIMS > 4:
            g += (element % n4) * s4
            element = element // n4
        if DIMS > 3:
            g += (element % n3) * s3
            element = element // n3
        if DIMS > 2:
            g += (element % n2) * s2
            element = element // n2
        if DIMS > 1:
            g += (element % n1) * s1
            element = element // n1
        g += element * s0
        seed = tl.load(seed_step).to(tl.uint64)
        shift: tl.constexpr = 1 if KIND == UNIFORM64 or KIND == NORMAL64 else 2
        low = (g >> shift).to(tl.uint32)
        high = (g >> shift >> 32).to(tl.uint32)
        zero = low ^ low
        step = tl.load(seed_step + 1).to(tl.uint32)
        w0, w1, w2, w3 = _philox(low, high, zero + call.to(tl.uint32), zero + step, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
        if KIND == UNIFORM64:
            bits = tl.where((g & 1) == 1, _wide(w2, w3), _wide(w0, w1))
            tl.store(out + i, bits.to(tl.float64) * _f64(1.0 / 9007199254740992.0), inside)
        elif KIND == NORMAL64:
            tl.store(out + i, _normal64(_wide(w0, w1), _wide(w2, w3), g & 1), inside)
        elif KIND == NORMAL32:
            second = (g & 2) == 2
            a = (tl.where(second, w2, w0) >> 8).to(tl.int32)
            b = (tl.where(second, w3, w1) >> 8).to(tl.int32)
            tl.store(out + i, _normal32(a, b, (g & 1).to(tl.int32)), inside)
        else:
            if QUADS:
                word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
            else:
                second = (g & 2) == 2
                word = tl.where((g & 1) == 1, tl.where(second, w3, w1), tl.where(second, w2, w0))
            bits = (word >> 8).to(tl.int32)
            if KIND == UNIFORM32:
                tl.store(out + i, bits.to(tl.float32) * (1.0 / 16777216.0), inside)
            else:
                keep = bits >= threshold
                tl.store(mask + i, keep.to(tl.int8), inside)
                if KIND == DROPOUT32 or KIND == DROPOUT64:
                    value = tl.load(x + i, inside)
                    wide = value.to(tl.float32) if KIND == DROPOUT32 else value
                    scale = tl.full((), SCALE, tl.float32 if KIND == DROPOUT32 else tl.float64)
                    tl.store(out + i, tl.where(keep, wide * scale, 0.0).to(value.dtype), inside)


def draw(
    kind: int, tile: Tile, out: Tensor | None, mask: Tensor | None, seed_step: Tensor | None, call: int, x: Tensor | None,
    threshold: int, scale: float,
) -> None:  # fmt: skip
    """`philox.draw` on CUDA; the tile has at most `DIMS` dims."""
    dims, n = len(tile.sizes), tile.elements
    sizes: list[int] = [*tile.sizes, *[1] * (DIMS - dims)]
    strides: list[int] = [*tile.strides, *[0] * (DIMS - dims)]
    one_word = kind in (UNIFORM32.value, MASK.value, DROPOUT32.value, DROPOUT64.value)
    aligned = tile.strides[-1] == 1 and all(value % 4 == 0 for value in (tile.base, tile.sizes[-1], *tile.strides[:-1]))
    at = out if out is not None else mask
    assert at is not None
    mask = None if mask is None else mask.view(torch.int8)
    with torch.cuda.device(at.device) if at.is_cuda else contextlib.nullcontext():  # Triton's interpreter takes CPU tensors
        _kernel[(triton.cdiv(n, BLOCK),)](
            seed_step, x, out, mask, call & 0xFFFFFFFF, tile.base, threshold, n, *sizes[1:], *strides,
            KIND=kind, QUADS=one_word and aligned, DIMS=dims, SCALE=scale, BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
