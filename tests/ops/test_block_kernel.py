"""Torch's kernel for scales of blocks: that it takes what it is given, without a device, and what it gives, on one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshc.ops.quantize import has_kernel, inverse, run_block_kernel, why_no_kernel

ours = torch.ops.meshc
SHAPES = {"rows and squares": (64, 3, 2), "rows and rows": (64, 3, 0), "one block of k": (16, 1, 5)}
"""Rows, blocks of k, blocks of columns; 0: 48 columns with scales of their own."""


def operands(rows: int, inner: int, columns: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = torch.randn(rows, inner, 128, dtype=torch.bfloat16, device=device)
    shape = (inner, 128, columns, 128) if columns else (inner, 128, 48)
    b = torch.randn(shape, dtype=torch.bfloat16, device=device)
    scales = ours.scale_of(a, [2], "e4m3", ""), ours.scale_of(b, [1, 3] if columns else [1], "e4m3", "")
    return ours.quantize(a, scales[0], "e4m3"), ours.quantize(b, scales[1], "e4m3"), *scales


@pytest.mark.parametrize("name", SHAPES)
def test_torch_takes_the_strides_of_scales(name: str) -> None:
    """As its own check says that the kernel wants them, which runs where nothing is computed."""
    a, b, scale_a, scale_b = operands(*SHAPES[name], "meta")
    made = run_block_kernel(a, b, inverse(scale_a), inverse(scale_b), torch.bfloat16)
    rows, _, columns = SHAPES[name]
    assert made.shape == (rows, 128 * columns or 48) and made.dtype == torch.bfloat16


def test_what_no_kernel_runs_is_told() -> None:
    a, b, scale_a, scale_b = operands(64, 3, 2, "cpu")
    assert why_no_kernel(a, b, scale_a, scale_b, torch.bfloat16, 2) == "" and not has_kernel(a, b, scale_a, scale_b, torch.bfloat16, 2)
    assert why_no_kernel(a, b, scale_a, scale_b, torch.float32, 2) == "the kernel for scales of blocks gives bfloat16 alone"
    assert "rows and columns in multiples of 16" in why_no_kernel(a[:7], b, scale_a[:7], scale_b, torch.bfloat16, 2)
    halves = a.reshape(64, 6, 64), b.reshape(6, 64, 2, 128)
    assert "other blocks than 128" in why_no_kernel(*halves, scale_a, scale_b, torch.bfloat16, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_gives_what_is_defined(name: str) -> None:
    a, b, scale_a, scale_b = operands(*SHAPES[name], "cuda")
    if not has_kernel(a, b, scale_a, scale_b, torch.bfloat16, 2):
        pytest.skip("this device has no kernel for scales of blocks")
    made = ours.scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, 2, 0).cpu().float()
    right = ours.scaled_mm(a.cpu(), b.cpu(), scale_a.cpu(), scale_b.cpu(), torch.bfloat16, 2, 0).float()
    assert (made - right).abs().max() <= 2**-7 * right.abs().max()
