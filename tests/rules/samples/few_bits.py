"""Scales, values rounded under them, and their products: of rows, of whole tensors, of blocks, and in a batch."""

from __future__ import annotations

import torch

import meshc.ops.quantize  # noqa: F401
from tests.rules.samples.calls import begin, f, sample

ours = torch.ops.meshc
begin(__name__)

for _dims in ([1], [0], [0, 1]):
    sample(ours.scale_of.default, f(5, 7), _dims, "e4m3", "")
    _scale = ours.scale_of(f(5, 7), _dims, "e4m3", "")
    sample(ours.quantize.default, f(5, 7), _scale, "e4m3")
    sample(ours.dequantize.default, ours.quantize(f(5, 7), _scale, "e4m3"), _scale, torch.float64)
sample(ours.scale_of.default, f(5, 7, 4), [2], "e4m3", "ocp")
sample(ours.scale_of.default, f(5, 7), [1], "int8", "down")
sample(ours.quantize.default, f(5, 7), ours.scale_of(f(5, 7), [1], "int8", ""), "int8")
_scale = ours.scale_of(f(5, 7, 4), [2], "e2m1", "")
sample(ours.scale_in_units.default, _scale, ours.scale_of(f(5, 7, 4), [0, 1, 2], "e2m1", ""))
sample(ours.quantize.default, f(5, 7, 4), _scale, "e2m1")


def _operand(shape: tuple[int, ...], over: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = f(*shape)
    scale = ours.scale_of(x, over, "e4m3", "")
    return ours.quantize(x, scale, "e4m3"), scale


for _a, _b in (([1], [0]), ([0, 1], [0, 1])):
    _rows, _columns = _operand((5, 7), _a), _operand((7, 6), _b)
    sample(ours.scaled_mm.default, _rows[0], _columns[0], _rows[1], _columns[1], torch.float64)
_rows, _columns = _operand((5, 7, 4), [2]), _operand((7, 4, 6), [1])
sample(ours.scaled_mm.default, _rows[0], _columns[0], _rows[1], _columns[1], torch.float64, 2)
_rows, _columns = _operand((5, 7, 4), [2]), _operand((7, 4, 3, 2), [1, 3])
sample(ours.scaled_mm.default, _rows[0], _columns[0], _rows[1], _columns[1], torch.float64, 2)
_rows, _columns = _operand((3, 5, 7), [2]), _operand((3, 7, 4), [1])
sample(ours.scaled_mm.default, _rows[0], _columns[0], _rows[1], _columns[1], torch.float64, 1, 1)
