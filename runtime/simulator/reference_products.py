"""Mode in which products of scaled 8-bit values run on a CPU where torch has no kernel for one: of groups, and with scales of blocks.

A model on one device computes them so in a comparison, from decoded values (`ops/decoded_products.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from meshc.ir.functions import Keywords
from meshc.ir.schemas import arguments_by_name
from meshc.ops import decoded_products as _decoded_products  # noqa: F401 - registers its operators
from meshc.private import OpOverload, TorchDispatchMode
from meshc.rules.torch_scaled import ScaleLayout, scales_of

aten, meshc = torch.ops.aten, torch.ops.meshc


def _grouped_mm(named: Mapping[str, Any]) -> Tensor:
    operands = (named[name] for name in ("self", "mat2", "scale_a", "scale_b", "offs"))
    made: Tensor = meshc.decoded_grouped_mm(*operands, named["out_dtype"] or torch.bfloat16, named["use_fast_accum"])
    return made


def _mm(named: Mapping[str, Any]) -> Tensor | None:
    """None for scales that only kernels of other devices read."""
    found = scales_of(named, lambda x: tuple(x.shape), lambda x: x.dtype)
    if found is None:
        return None
    a, b = named["self"], named["mat2"]
    scales = (_in_order(named[name], layout) for name, layout in (("scale_a", found.a), ("scale_b", found.b)))
    dtype = named["out_dtype"] or a.dtype
    made: Tensor = meshc.decoded_mm(a, b, *scales, named["bias"], named.get("scale_result"), dtype, named["use_fast_accum"])
    return made


def _in_order(scale: Tensor | Sequence[Tensor], layout: ScaleLayout) -> Tensor:
    one = scale if isinstance(scale, Tensor) else scale[0]
    one = one if layout.kept is None else one[: layout.kept]
    return one.t() if layout.turned else one


STAND_INS: Final[Mapping[object, Callable[[Mapping[str, Any]], Tensor | None]]] = {
    aten._scaled_mm.default: _mm, aten._scaled_mm_v2.default: _mm, aten._scaled_grouped_mm.default: _grouped_mm,
}  # fmt: skip


class DecodedProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Keywords | None = None) -> object:
        if func in STAND_INS and type(args[0]) is Tensor and args[0].device.type == "cpu":
            made = STAND_INS[func](arguments_by_name(func, args, kwargs or {}))
            if made is not None:
                return made
        return func(*args, **(kwargs or {}))
