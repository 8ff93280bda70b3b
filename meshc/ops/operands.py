"""Error for operands of a meshc operator whose shapes, dtypes or devices do not match.

Kernels walk memory by the sizes of one operand and would read or write past the end of another. So every operator compares sizes before it
starts, with real tensors as with fake ones; values are looked at only where a kernel trusts them.
"""

from __future__ import annotations

from torch import Tensor


def misfit(operator: str, rule: str, **operands: Tensor | None) -> ValueError:
    """The error for operands of which `rule` does not hold, by name."""
    given = ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        for name, tensor in operands.items()
        if tensor is not None
    )
    return ValueError(f"meshc::{operator}: {rule}; given are {given}")
