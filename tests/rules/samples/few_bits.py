"""Scales, also of a history, values under them, their products (of rows, whole tensors, blocks, a batch), gradients in fewer bits."""

from __future__ import annotations

import torch

import meshc.ops.compress
import meshc.ops.quantize  # noqa: F401
from tests.rules.samples.calls import begin, f, sample

aten, ours = torch.ops.aten, torch.ops.meshc
begin(__name__)

for _dims in ([1], [0], [0, 1]):
    sample(ours.scale_of.default, f(5, 7), _dims, "e4m3", "")
    _scale = ours.scale_of(f(5, 7), _dims, "e4m3", "")
    sample(ours.quantize.default, f(5, 7), _scale, "e4m3")
    sample(ours.dequantize.default, ours.quantize(f(5, 7), _scale, "e4m3"), _scale, torch.float64)
sample(ours.scale_of.default, f(5, 7, 4), [2], "e4m3", "ocp")
sample(ours.scale_of.default, f(5, 7), [1], "int8", "down")
sample(ours.quantize.default, f(5, 7), ours.scale_of(f(5, 7), [1], "int8", ""), "int8")
_seed, _scale = torch.tensor([3, 5]), ours.scale_of(f(6, 8), [1], "e4m3", "down")
sample(ours.quantize_by_draw.default, f(6, 8), _scale, "e4m3", _seed, "w/g", [6, 8], [6, 8], [0, 0], refine={0: (3, 2, 8)})
_scale = ours.scale_of(f(5, 2, 4), [2], "e2m1", "")
sample(ours.quantize_by_draw.default, f(5, 2, 4), _scale, "e2m1", _seed, "w/g", [5, 2, 4], [5, 2, 4], [0, 0, 0])
sample(ours.scale_of_history.default, f(16).abs().to(torch.float32), 2, "e5m2")
for _dims in ([0, 1], [1]):
    sample(ours.peak_of.default, f(5, 7), _dims)
sample(ours.next_history.default, f(16).abs().to(torch.float32), ours.peak_of(f(5, 7), [0, 1]))
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
# ------------------------------------------------------------------------------------------------------------------- torch's products

EIGHT = torch.float8_e4m3fn
SINGLE, HALF = torch.float32, torch.bfloat16


def _values(*shape: int) -> torch.Tensor:
    return (2 * f(*shape)).round().to(EIGHT)


def _scales(*shape: int) -> torch.Tensor:
    """Powers of two: products of few bits then add up exactly, in any order."""
    return torch.exp2(f(*shape).round()).to(SINGLE)


sample(aten._scaled_mm.default, _values(5, 7), _values(7, 6), _scales(5, 1), _scales(1, 6), None, None, SINGLE)
sample(aten._scaled_mm.default, _values(5, 7), _values(6, 7).t(), _scales(), _scales(1), f(6).to(SINGLE), None, SINGLE)
sample(aten._scaled_mm.default, _values(7, 5).t(), _values(7, 6), _scales(), _scales(), f(6).to(HALF), out_dtype=HALF)
sample(aten._scaled_mm.default, _values(5, 7), _values(7, 6).to(torch.float8_e5m2), _scales(), _scales(), None, _scales())
sample(aten._scaled_mm.default, _values(1, 7), _values(7, 6), _scales(1, 1), _scales(1, 6), out_dtype=SINGLE)


def _decoded(
    a: torch.Tensor, b: torch.Tensor, scale_a: list[torch.Tensor], recipe_a: list[int], swizzle_a: list[int],
    scale_b: list[torch.Tensor], recipe_b: list[int], swizzle_b: list[int], bias: torch.Tensor | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`F.scaled_mm` on a CPU, also with scales of blocks: rows [m or n, k / 128], squares [k / 128, m or n / 128] with rows to spare."""
    (m, k), n = a.shape, b.shape[1]
    rows = _lying_by_rows(scale_a[0], recipe_a[0], m, k)
    columns = _lying_by_rows(scale_b[0].reshape(n, 1) if recipe_b[0] == 1 else scale_b[0], recipe_b[0], n, k)
    made = (a.float() * rows) @ (b.float() * columns.t())
    return (made if bias is None else made + bias.float()).to(dtype)


def _lying_by_rows(scale: torch.Tensor, recipe: int, rows: int, k: int) -> torch.Tensor:
    if recipe == 5:
        return scale[: k // 128].t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return scale.repeat_interleave(128, 1) if recipe == 4 else scale



for _recipes, _shapes in (
    ((0, 0), ((), ())),
    ((1, 1), ((5, 1), (1, 6))),
    ((1, 1), ((5, 1), (6, 1))),
):
    sample(
        aten._scaled_mm_v2.default, _values(5, 7), _values(7, 6), [_scales(*_shapes[0])], [_recipes[0]], [], [_scales(*_shapes[1])],
        [_recipes[1]], [], f(6).to(SINGLE), SINGLE, stand_in=_decoded,
    )  # fmt: skip
for _recipes, _sizes, _shapes in (
    ((4, 4), (5, 384, 6), ((5, 3), (6, 3))),
    ((4, 5), (5, 512, 384), ((5, 4), (4, 3))),
    ((4, 5), (5, 384, 256), ((5, 3), (4, 2))),
    ((5, 4), (256, 512, 5), ((4, 2), (5, 4))),
):
    sample(
        aten._scaled_mm_v2.default, _values(*_sizes[:2]), _values(*_sizes[1:]), [_scales(*_shapes[0])], [_recipes[0]], [],
        [_scales(*_shapes[1])], [_recipes[1]], [], None, SINGLE, stand_in=_decoded,
    )  # fmt: skip


def _of_groups(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, ends: torch.Tensor | None = None, **_: object
) -> torch.Tensor:
    """`torch._scaled_grouped_mm` on a CPU, with one product for each group; what is in no run is zero."""
    groups = a.shape[0] if ends is None else len(ends)
    stops = [] if ends is None else [0, *ends.tolist()]
    runs = [slice(None)] * groups if ends is None else [slice(*stops[group : group + 2]) for group in range(groups)]
    in_both = a.dim() == b.dim() == 2
    rows = a.float() * (scale_a.unsqueeze(-1) if not in_both else 1.0)
    columns = b.float() * (scale_b.unsqueeze(-2) if not in_both else 1.0)
    if a.dim() == b.dim() == 3:
        return (rows @ columns).to(HALF)
    if in_both:
        scales = scale_a.reshape(groups, -1, 1) * scale_b.reshape(groups, 1, -1)
        return (torch.stack([rows[:, run] @ columns[run] for run in runs]) * scales).to(HALF)
    parts = [rows[run] @ columns[g] if a.dim() == 2 else rows[g] @ columns[:, run] for g, run in enumerate(runs)]
    left = (a.shape[0] if a.dim() == 2 else b.shape[1]) - stops[-1]
    rest = torch.zeros((left, b.shape[-1]) if a.dim() == 2 else (a.shape[1], left))
    return torch.cat([*parts, rest], 0 if a.dim() == 2 else 1).to(HALF)


_ends = torch.tensor([3, 3, 7], dtype=torch.int32)
for _a, _b, _shapes, _offs in (
    ((8, 7), (3, 7, 5), ((8,), (3, 5)), _ends),
    ((3, 5, 7), (7, 8), ((3, 5), (8,)), _ends),
    ((5, 8), (8, 7), ((15,), (21,)), _ends),
    ((3, 5, 7), (3, 7, 4), ((3, 5), (3, 4)), None),
):
    sample(
        aten._scaled_grouped_mm.default, _values(*_a), _values(*_b), _scales(*_shapes[0]), _scales(*_shapes[1]), _offs,
        stand_in=_of_groups,
    )  # fmt: skip
