"""Products in few bits as a device runs them: by a kernel for 8 bits, or emulated, brought back to float32 and multiplied there."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.fx import Node

from meshc import ir
from meshc.cost.devices import EIGHT_BITS, Device
from meshc.ir.schemas import named_arguments
from meshc.ops import decoded_products as _decoded_products  # noqa: F401 - registers its operators
from meshc.ops.quantize import why_no_kernel

ours = torch.ops.meshc
SCALED: Final = (ours.scaled_mm.default, ours.decoded_mm.default)
"""Products of two matrices of scaled values that run by the same kernels."""


BLOCK_KERNELS: Final = ("h100", "h200")
"""Devices of compute capability 9.0, on which cuBLASLt has kernels for scales of blocks of 128."""


def why_emulated(node: Node, device: Device | None = None) -> str:
    """Why no kernel for 8 bits runs a scaled product, on any device, or on `device`; "" if one does."""
    if node.target in SCALED:
        named: dict[str, Any] = named_arguments(node)
        a, b, scale_a, scale_b = (ir.record(named[name]) for name in ("a", "b", "scale_a", "scale_b"))
        if why := why_no_kernel(a, b, scale_a, scale_b, named["dtype"], named.get("summed", 1), named.get("batch", 0)):
            return why
        if named.get("summed", 1) > 1 and device is not None and device.name not in BLOCK_KERNELS:
            return f"{device.name} has no kernel for scales of blocks"
    return "" if device is None or EIGHT_BITS in device.flops_per_s else f"{device.name} has no products of 8 bits"
