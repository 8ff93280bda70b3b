"""Fake quantisation taken apart: to the last bit what torch's kernels give, and a step of it on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.passes.trace.decompositions import decompositions

aten = torch.ops.aten
RANGES = ((-128, 127), (0, 255), (-8, 7))


def calls(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    """Of every operator, with levels outside of the range, infinities, and what is no number."""
    x = 20 * torch.randn(5, 7, 3, dtype=dtype)
    x[0, 0] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    found: list[tuple[Any, tuple[Any, ...]]] = []
    for low, high in RANGES:
        zero, scales, zeros = low + 3, torch.rand(7) * 0.3 + 1e-4, torch.randint(low, high, (7,), dtype=torch.int32)
        found += [
            (aten.fake_quantize_per_tensor_affine_cachemask, (x, 0.0371, zero, low, high)),
            (aten.fake_quantize_per_channel_affine_cachemask, (x, scales, zeros, 1, low, high)),
            (aten.fake_quantize_per_channel_affine_cachemask, (x, scales, zeros + 0.3, 1, low, high)),
            (aten._fake_quantize_learnable_per_tensor_affine, (x, torch.tensor([0.0371]), torch.tensor([zero + 0.5]), low, high)),
            (aten._fake_quantize_learnable_per_channel_affine, (x, scales, zeros + 0.3, 1, low, high)),
        ]
        for enabled in (0, 1):
            read = (torch.tensor([0.0371]), torch.tensor([zero], dtype=torch.int32), torch.tensor([enabled]))
            found.append((aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams, (x, *read, low, high)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_is_the_kernels_to_the_last_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for operator, args in calls(dtype):
        ours, torchs = decompositions()[operator.default](*args), operator(*args)
        for one, other in zip(ours, torchs, strict=True) if isinstance(torchs, tuple) else ((ours, torchs),):
            assert one.dtype == other.dtype and torch.equal(one.nan_to_num(7777), other.nan_to_num(7777)), operator


def test_gradients_of_scales_and_zero_points_are_the_kernels() -> None:
    torch.manual_seed(0)
    x, grad = 20 * torch.randn(2, 5, 7)
    for low, high in RANGES:
        scale, zero, factor = torch.tensor([0.3]), torch.tensor([low + 2.5]), 0.7
        args = (grad, x, scale, zero, low, high, factor)
        operator = aten._fake_quantize_learnable_per_tensor_affine_backward
        torch.testing.assert_close(decompositions()[operator.default](*args), operator(*args))
        channels = (grad, x, torch.rand(7) + 0.1, low + 4 * torch.rand(7), 1, low, high, factor)
        operator = aten._fake_quantize_learnable_per_channel_affine_backward
        torch.testing.assert_close(decompositions()[operator.default](*channels), operator(*channels))


class Quantised(nn.Module):
    """Weights by channel, what goes in by numbers, what comes between by a scale in a buffer, what goes out by one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("scale", torch.tensor([0.05]))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))
        self.trained, self.offset = nn.Parameter(torch.tensor([0.04])), nn.Parameter(torch.tensor([1.2]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.02, 3, -128, 127)
        widest = self.up.weight.detach().abs().amax(1) / 127
        weight = torch.fake_quantize_per_channel_affine(self.up.weight, widest, torch.zeros(12, dtype=torch.int32), 0, -127, 127)
        h = torch.fake_quantize_per_tensor_affine(F.linear(x, weight, self.up.bias).relu(), self.scale, self.zero, 0, 255)
        return torch._fake_quantize_learnable_per_tensor_affine(self.down(h), self.trained, self.offset, -128, 127, 1.0)


def test_a_quantised_step_equals_one_device() -> None:
    torch.manual_seed(0)
    model, x = Quantised(), torch.randn(4, 8)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out: (out - 1).square().mean())
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=(x,))
    meshc.verify(program, (x,))
    assert "/tp" in str(program) and "fake_quantize" not in "".join(line.partition("#")[0] for line in str(program).splitlines())
