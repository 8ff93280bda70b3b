"""Error for operands of a meshc operator whose shapes, dtypes or devices do not match.

Kernels index memory by the sizes of one operand and would read or write past the end of another. So every operator compares sizes first,
for real and for fake tensors; values are checked only where a kernel relies on them.
"""

from __future__ import annotations

from torch import Tensor


def misfit(operator: str, rule: str, **operands: Tensor | None) -> ValueError:
    """ValueError that states `rule` and describes the operands, by name, for which it does not hold."""
    given = ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        for name, tensor in operands.items()
        if tensor is not None
    )
    return ValueError(f"meshc::{operator}: {rule}; given are {given}")
