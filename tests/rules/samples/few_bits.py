"""Scales, values rounded under them, their products (of rows, of whole tensors, of blocks, in a batch), and gradients in fewer bits."""

from __future__ import annotations

import torch

import meshc.ops.compress
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

for _shape, _more in (((3, 515), {}), ((2, 3, 520), {}), ((2, 768), {"refine": {0: (2, 6, 128)}})):
    _tile = list(_shape), list(_shape), [0] * len(_shape), 1
    _peak = ours.block_scale(f(*_shape), *_tile)
    for _element in ("int8", "e4m3"):
        sample(ours.quantize_blocks.default, f(*_shape), _peak, _element, *_tile, **_more)
        _q = ours.quantize_blocks(f(*_shape), _peak, _element, *_tile)
        sample(ours.dequantize_blocks.default, _q, _peak, _element, torch.float64, *_tile, **_more)
sample(ours.pack_signs.default, f(3, 5, 8))
sample(ours.unpack_signs.default, ours.pack_signs(f(3, 5, 8)), f(3, 1).abs())
sample(ours.unpack_signs.default, ours.pack_signs(f(3, 5, 8)), f(1, 1).abs())
