"""Pooling and resizing. Space is small and uneven, so that some tiles are empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshc.ops.upsample  # noqa: F401
from tests.rules.samples.calls import begin, f, sample

aten = torch.ops.aten
ours = torch.ops.meshc
begin(__name__)


def maximum(x: Tensor, *settings: Any) -> None:
    """kernel, stride, padding, dilation, ceil_mode"""
    forward, backward = {
        2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
        3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
    }[len(settings[0])]
    sample(forward.default, x, *settings)
    found, indices = forward(x, *settings)
    sample(backward.default, f(*found.shape), x, *settings, indices)


def mean(x: Tensor, *settings: Any) -> None:
    """kernel, stride, padding, ceil_mode, count_include_pad, divisor_override"""
    forward, backward = {2: (aten.avg_pool2d, aten.avg_pool2d_backward), 3: (aten.avg_pool3d, aten.avg_pool3d_backward)}[len(settings[0])]
    sample(forward.default, x, *settings)
    sample(backward.default, f(*forward(x, *settings).shape), x, *settings)


sample(aten.max_pool2d_with_indices.default, f(3, 4, 6, 6), [2, 2], [2, 2])
maximum(f(2, 3, 6, 7) - 5, [3, 3], [2, 2], [1, 1], [1, 1], False)
maximum(f(2, 7, 5), [3, 2], [1, 1], [1, 0], [2, 1], False)
maximum(f(2, 2, 7, 8), [3, 2], [2, 3], [0, 1], [1, 1], True)
maximum(f(2, 3, 1, 7), [1, 2], [], [0, 0], [1, 1], False)
maximum(f(2, 2, 4, 5, 3), [2, 3, 2], [2, 1, 1], [1, 1, 0], [1, 1, 1], False)
sample(aten.avg_pool2d.default, f(3, 4, 6, 6), [2, 2], [2, 2])
mean(f(4, 6, 6), [2, 2], [2, 2], [0, 0], False, True, None)
mean(f(2, 3, 5, 7), [3, 3], [1, 2], [1, 1], False, True, None)
mean(f(2, 3, 5, 7), [3, 3], [2, 1], [1, 1], False, False, None)
mean(f(2, 2, 6, 8), [3, 3], [2, 2], [1, 0], True, True, None)
mean(f(2, 2, 6, 8), [3, 3], [2, 2], [1, 0], True, False, None)
mean(f(2, 2, 6, 5), [2, 3], [2, 2], [1, 1], False, False, 5)
mean(f(2, 2, 4, 5, 3), [2, 3, 2], [2, 1, 1], [1, 1, 0], False, False, None)

# ----------------------------------------------------------------------------------------------------------------------- resizing

_pool = f(3, 4, 6, 6)
sample(aten._adaptive_avg_pool2d.default, _pool, [3, 3])
sample(aten._adaptive_avg_pool2d.default, f(3, 6, 5), [3, 3])
sample(aten._adaptive_avg_pool2d_backward.default, f(3, 4, 3, 3), _pool)
sample(aten._adaptive_avg_pool2d_backward.default, f(3, 4, 5, 3), f(3, 4, 7, 6))
sample(aten._adaptive_avg_pool3d.default, f(3, 2, 4, 4, 6), [2, 2, 2])
sample(aten._adaptive_avg_pool3d_backward.default, f(3, 2, 4, 2, 2), f(3, 2, 4, 4, 6))
sample(aten.adaptive_max_pool2d.default, _pool, [3, 3])
sample(aten.reflection_pad2d.default, _pool, [1, 1, 2, 2])
sample(aten.replication_pad2d.default, _pool, [1, 1, 2, 2])
sample(aten.upsample_nearest2d.default, _pool, [12, 12])
sample(aten.upsample_nearest2d.vec, _pool, None, [2.0, 2.0])
sample(aten.upsample_bilinear2d.default, _pool, [12, 12], False)
sample(aten.upsample_bilinear2d.vec, _pool, [12, 12], True, None)
sample(aten.upsample_nearest2d_backward.default, f(3, 4, 12, 12), [12, 12], [3, 4, 6, 6])
sample(aten.upsample_bilinear2d_backward.default, f(3, 4, 12, 12), [12, 12], [3, 4, 6, 6], False)
for shape, factors in (((2, 3, 5), [2]), ((2, 3, 4, 5), [2, 3]), ((2, 2, 3, 1, 2), [1, 2, 2])):
    x = f(*shape)
    sample(ours.upsample.default, x, factors)
    sample(ours.upsample_backward.default, f(*ours.upsample(x, factors).shape), factors)
sample(aten.avg_pool2d.default, f(1, 3, 1, 9), [1, 3], [1, 1], [0, 1], True, False)
for _dims in (2, 3):
    _forward = getattr(aten, f"fractional_max_pool{_dims}d").default
    for _lead in ((5, 3), (3,)):
        _x, _kernel, _size = f(*_lead, *[7] * _dims), [2] * _dims, [3] * _dims
        _where = f(*(_lead if len(_lead) == 2 else (1, 3)), _dims).sigmoid()
        sample(_forward, _x, _kernel, _size, _where)
        _out, _indices = _forward(_x, _kernel, _size, _where)
        if _dims == 2:  # torch has no meta kernel for the other
            sample(aten.fractional_max_pool2d_backward.default, f(*_out.shape), _x, _kernel, _size, _indices)
