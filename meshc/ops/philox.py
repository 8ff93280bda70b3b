"""Draws and dropout of one tile by Philox-4x32-10: choice of the kernel, build of the CPU kernel, and the arithmetic in plain torch.

`draw` is the entry point: it uses the Triton kernel on CUDA, the compiled kernel on the CPU, and torch where there is neither compiler nor
Triton. All three give the same bits; docs/randomness.md has the definition. The compiled kernel is built once per machine, at first use,
into the kernel cache, from philox.cpp beside this file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from meshc import environment
from meshc.files import kernel_cache
from meshc.lazy_module import LazyModule
from meshc.ops.definition import misfit
from meshc.ops.tile import Tile

if TYPE_CHECKING:
    from meshc.ops import philox_triton
else:
    philox_triton = LazyModule("meshc.ops.philox_triton")

# Position is the kernel's number for it (philox.cpp, philox_triton.py).
KINDS = ("uniform32", "uniform64", "normal32", "normal64", "mask", "dropout32", "dropout64", "backward32", "backward64", "round16")
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")
SOURCE = Path(__file__).with_name("philox.cpp")
WORD = 0xFFFFFFFF


def draw(
    kind: str,
    tile: Tile,
    out: Tensor | None,
    mask: Tensor | None = None,
    seed_step: Tensor | None = None,
    call: int = 0,
    x: Tensor | None = None,
    threshold: int = 0,
    scale: float = 1.0,
) -> None:
    """Fill `out` and `mask` (contiguous, `tile.elements` long) on their device; `kind` is one of `KINDS`, seed_step is int64 [2]."""
    at = out if out is not None else mask
    if at is None or tile.elements == 0:
        return
    for operand in (out, mask, x):
        if operand is not None and (operand.numel() != tile.elements or not operand.is_contiguous() or operand.device != at.device):
            raise misfit(kind, f"operands are contiguous and hold {tile.elements} elements", out=out, mask=mask, x=x)
    if at.is_cuda and len(tile.sizes) <= 6 and _has_triton():
        philox_triton.draw(KINDS.index(kind), tile, out, mask, seed_step, call, x, threshold, scale)
        return
    native = library() if at.device.type == "cpu" else None
    if native is None:
        if at.device.type != "cpu":
            _warn_once(f"no Triton kernel for this draw on {at.device}")
        _draw_torch(kind, tile, out, mask, seed_step, call, x, threshold, scale)
        return
    seed = None if seed_step is None else seed_step.contiguous()
    pointers = [None if t is None else t.data_ptr() for t in (seed, x, out, mask)]
    refused = native.meshc_draw(
        KINDS.index(kind), pointers[0], call & WORD, len(tile.sizes), tile.base, *tile.rows, threshold, scale, *pointers[1:],
        tile.elements, torch.get_num_threads(),
    )  # fmt: skip
    if refused:
        raise misfit(kind, f"the kernel takes no tile of {tile.sizes} with these operands", out=out, mask=mask, x=x, seed_step=seed)


def block(counter: Sequence[int], key: Sequence[int], compiled: bool = True) -> list[int]:
    """One raw Philox-4x32-10 block, for tests: four counter words and two key words give four words."""
    if not compiled:
        words = [torch.tensor([value]) for value in (*counter, *key)]
        return [int(word) for word in _philox(words[0], words[1], words[2], words[3], words[4], words[5])]
    native = library()
    if native is None:
        raise RuntimeError("there is no compiled kernel on this machine")
    out = (ctypes.c_uint32 * 4)()
    native.meshc_block((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
    return list(out)


# ---------------------------------------------------------------------------------------------------------------- the compiled kernel


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, built if need be; None, with one warning, where it cannot be built."""
    try:
        native = _compile_library()
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or ""
        _warn_once(f"the CPU kernel could not be built ({error})\n{detail[-2000:]}".rstrip())
        return None
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    native.meshc_draw.argtypes = [ctypes.c_int, pointer, i64, i64, i64, pointer, pointer, i64, ctypes.c_double, *[pointer] * 3, i64, i64]
    native.meshc_draw.restype = ctypes.c_int
    native.meshc_block.argtypes = [pointer] * 3
    native.meshc_block.restype = None
    native.meshc_encode.argtypes = [*[pointer] * 6, *[i64] * 4, ctypes.c_int, pointer, i64]
    native.meshc_encode.restype = ctypes.c_int
    return native


def compiler() -> str | None:
    """The C++ compiler that builds the kernel; None without one."""
    return next(filter(None, map(shutil.which, filter(None, (environment.compiler_name(), "c++", "g++", "clang++")))), None)


def _compile_library() -> ctypes.CDLL:
    """The library of philox.cpp, from the cache or compiled now (`meshc.files.kernel_cache`).

    The file name has a hash of source, compiler, flags and architecture. The library selects its vector instructions when it is loaded, so
    machines with different processors may share the cache. Raises OSError without a compiler, CalledProcessError if compiling fails.
    """
    found = compiler()
    if found is None:
        raise FileNotFoundError("no C++ compiler: neither $CXX nor c++, g++, clang++")
    real = os.path.realpath(found)
    identity = repr((real, os.stat(real).st_mtime_ns, FLAGS, platform.system(), platform.machine(), "hashed")).encode()
    name = f"philox-{hashlib.sha256(SOURCE.read_bytes() + identity).hexdigest()[:24]}.so"

    def build(file: Path) -> None:
        command = [found, *FLAGS, "-o", str(file), str(SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        except subprocess.CalledProcessError:  # a toolchain without run-time dispatch of instructions
            subprocess.run([*command, "-DMESHC_NO_CLONES"], check=True, capture_output=True, text=True, timeout=300)

    return kernel_cache.library(name, build)


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"meshc draws random numbers in plain torch: {why}\n"
        "  cost: about 60 ns and 100 bytes of scratch an element, instead of 2 ns; the numbers are the same\n"
        "  what to do: install a C++ compiler (g++ or clang++, or name one in $CXX), on CUDA install triton",
        RuntimeWarning,
        stacklevel=2,
    )


# ----------------------------------------------------------------------------------------------------------- the same, in plain torch

# fdlibm e_logf.c, e_log.c, k_sin.c, k_cos.c; single sine and cosine: Cephes sinf.c.
LOG = {
    torch.float32: (6.6666662693e-01, 4.0000972152e-01, 2.8498786688e-01, 2.4279078841e-01),
    torch.float64: (
        6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
        1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
    ),
}  # fmt: skip
SIN = {
    torch.float32: (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4),
    torch.float64: (
        -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04,
        2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10,
    ),
}  # fmt: skip
COS = {
    torch.float32: (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5),
    torch.float64: (
        4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05,
        -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11,
    ),
}  # fmt: skip
LN2 = {torch.float32: (6.9313812256e-01, 9.0580006145e-06), torch.float64: (6.93147180369123816490e-01, 1.90821492927058770002e-10)}
# bits of a uniform, bits of the mantissa, exponent bias, the patterns of 1 and of sqrt(1/2), the integer of the same size
LAYOUT = {
    torch.float32: (24, 23, 127, 0x3F800000, 0x3F3504F3, torch.int32),
    torch.float64: (53, 52, 1023, 0x3FF0000000000000, 0x3FE6A09E667F3BCD, torch.int64),
}


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on int64 tensors of 32-bit words; products wrap modulo 2^64, and the mask removes the extended sign."""
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) & WORD ^ c1 ^ k0, b & WORD, (a >> 32) & WORD ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def _draw_torch(
    kind: str, tile: Tile, out: Tensor | None, mask: Tensor | None, seed_step: Tensor | None, call: int, x: Tensor | None,
    threshold: int, scale: float,
) -> None:  # fmt: skip
    if kind.startswith("backward"):
        assert x is not None and out is not None and mask is not None
        out.copy_(torch.where(mask, x * scale, 0.0))
        return
    assert seed_step is not None
    index = torch.full((), tile.base, dtype=torch.int64, device=seed_step.device)
    for size, stride in zip(tile.sizes, tile.strides, strict=True):
        index = index.unsqueeze(-1) + torch.arange(size, device=seed_step.device) * stride
    index = index.reshape(-1)
    counter = index >> (1 if kind in ("uniform64", "normal64") else 2)
    seed, step = seed_step[0], seed_step[1]
    w = _philox(counter & WORD, counter >> 32 & WORD, torch.full_like(counter, call & WORD), step & WORD, seed & WORD, seed >> 32 & WORD)
    odd, second = index & 1, (index & 2) != 0
    if kind == "uniform64" and out is not None:
        value = torch.where(odd == 1, _wide(w[2], w[3]), _wide(w[0], w[1])).double() * 2.0**-53
    elif kind == "normal64":
        value = _normal(_wide(w[0], w[1]), _wide(w[2], w[3]), odd, torch.float64)
    elif kind == "normal32":
        value = _normal(torch.where(second, w[2], w[0]) >> 8, torch.where(second, w[3], w[1]) >> 8, odd, torch.float32)
    else:
        even_word, odd_word = torch.where(second, w[2], w[0]), torch.where(second, w[3], w[1])
        bits = torch.where(odd == 1, odd_word, even_word) >> 8
        value = bits.float() * 2.0**-24
        if mask is not None:
            keep = bits >= threshold
            mask.copy_(keep.view(mask.shape))
            if x is not None:
                value = torch.where(keep, x.reshape(-1) * scale, 0.0)
    if out is not None:
        out.copy_(value.view(out.shape))


def _wide(high: Tensor, low: Tensor) -> Tensor:
    """The upper 53 of 64 bits, as an int64; the sum of the two shifts never reaches the sign bit."""
    return (high << 21) | (low >> 11)


def _horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    y = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        y = y * x + coefficient
    return y


def _normal(a: Tensor, b: Tensor, odd: Tensor, dtype: torch.dtype) -> Tensor:
    """sqrt(-2 ln((a + 1) / 2^bits)) * cos(2 pi (b - odd / 4) / 2^bits); a, b int64 in [0, 2^bits)."""
    bits, mantissa, bias, one, sqrt_half, integer = LAYOUT[dtype]
    pattern = (a + 1).to(dtype).view(integer).to(torch.int64) + (one - sqrt_half)
    exponent = ((pattern >> mantissa) - (bias + bits)).to(dtype)
    pattern = (pattern & ((1 << mantissa) - 1)) + sqrt_half
    f = pattern.to(integer).view(dtype) - 1.0
    s = f / (f + 2.0)
    z = s * s
    tail, half = z * _horner(z, LOG[dtype]), (f * f) * 0.5
    ln = exponent * LN2[dtype][0] - ((half - (s * (half + tail) + exponent * LN2[dtype][1])) - f)

    turn = (b - (odd << (bits - 2))) & ((1 << bits) - 1)
    quarter = ((turn + (1 << (bits - 3))) >> (bits - 2)) & 3
    rest = turn - (quarter << (bits - 2))
    rest = torch.where(rest >= 1 << (bits - 1), rest - (1 << bits), rest)
    angle = rest.to(dtype) * (2 * math.pi / 2**bits)
    q = angle * angle
    sine = angle + (angle * q) * _horner(q, SIN[dtype])
    cosine = (1.0 - q * 0.5) + (q * q) * _horner(q, COS[dtype])
    c = torch.where((quarter & 1) == 1, sine, cosine)
    c = torch.where(((quarter + 1) & 2) == 2, -c, c)
    radius = ln * -2.0
    # torch's CPU square root is not correctly rounded (it comes from MKL); numpy's is.
    root = torch.from_numpy(numpy.sqrt(radius.numpy())) if radius.device.type == "cpu" else torch.sqrt(radius)
    return root * c
