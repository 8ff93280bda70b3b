"""What AOTAutograd takes apart: equal to torch's own, and made of operators that a program may name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import meshc
from meshc.passes.decompositions import native_group_norm, var_mean

ROWS = [((5, 7), [1], 1.0), ((5, 1), [1], 0.0), ((5, 1), [1], 1.0), ((4, 3), [0, 1], 0.0), ((2,), [0], 2.0)]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("shape, dims, correction", ROWS)
def test_variance_and_mean(shape: tuple[int, ...], dims: list[int], correction: float) -> None:
    x = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).square()
    found, wanted = var_mean(x, dims, correction=correction), torch.var_mean(x, dims, correction=correction)
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("shape, groups", [((3, 4, 5), 2), ((3, 3), 3), ((2, 6, 3, 2), 1)])
def test_group_norm(shape: tuple[int, ...], groups: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight, bias = torch.linspace(1, 2, shape[1]).double(), torch.linspace(0, 1, shape[1]).double()
    pixels = x.numel() // (shape[0] * shape[1])
    found = native_group_norm(x, weight, bias, shape[0], shape[1], pixels, groups, 1e-5)
    torch.testing.assert_close(found, torch.native_group_norm(x, weight, bias, shape[0], shape[1], pixels, groups, 1e-5))


class Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 2)


def test_group_norm_splits_and_is_written_in_aten() -> None:
    program = meshc.compile(Norm(), meshc.Mesh("dp=2"), args=(torch.randn(5, 4, 3),))
    assert "prims." not in str(program)
    assert meshc.verify(program).worst < 1e-5
    assert program.compiled.notes == []
