"""What AOTAutograd takes apart: equal to torch's own, and made of operators that a program may name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import meshc
from meshc.cost import divided_work
from meshc.passes.trace.decompositions import convolution_backward, native_group_norm, var_mean, weight_norm, weight_norm_backward

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


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weight_norm(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    v, grad = torch.randn(2, 3, 4, 5, generator=generator).to(dtype)
    g = torch.randn([size if d == dim else 1 for d, size in enumerate(v.shape)], generator=generator).to(dtype)
    found, wanted = weight_norm(v, g, dim), torch._weight_norm_interface(v, g, dim)
    torch.testing.assert_close(found, wanted)
    back = torch.ops.aten._weight_norm_interface_backward(grad, v, g, wanted[1], dim)
    near = 1e-9 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(weight_norm_backward(grad, v, g, wanted[1], dim), back, rtol=near, atol=near)


@pytest.mark.parametrize("wanted", [[False, False, True], [True, False, True], [False, True, False]])
def test_a_bias_alone_reads_the_gradient_alone(wanted: list[bool]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((2, 3, 5, 6), (4, 3, 2, 2), (2, 4, 4, 5)))
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)
    found = convolution_backward(grad, x, weight, [4], *settings)
    if wanted != [False, False, True]:
        assert found is NotImplemented  # it stays one operator
        return
    torch.testing.assert_close(found[2], torch.ops.aten.convolution_backward(grad, x, weight, [4], *settings)[2])
    assert found[:2] == (None, None)


def test_a_weight_norm_splits() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(4, 6, 3), dim=2), torch.nn.ReLU(),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(6, 4, 3)),
    )  # fmt: skip
    step = meshc.TrainStep(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=F.mse_loss)
    program = meshc.compile(step, meshc.Mesh("tp=3"), args=(torch.randn(2, 4, 9),), kwargs={"target": torch.randn(2, 4, 5)})
    assert meshc.verify(program).ok
    assert not any("has no rule" in note for note in program.compiled.notes)
    assert all(row.by_axis["tp"] == divided_work.SPLIT for row in divided_work.work_rows(program.compiled) or [])


class Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 2)


def test_group_norm_splits_and_is_written_in_aten() -> None:
    program = meshc.compile(Norm(), meshc.Mesh("dp=2"), args=(torch.randn(5, 4, 3),))
    assert "prims." not in str(program)
    assert meshc.verify(program).worst < 1e-5
    assert program.compiled.notes == []
