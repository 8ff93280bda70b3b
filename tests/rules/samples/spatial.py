"""Padding, pooling, unpooling and sampling of images."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, sample

aten = torch.ops.aten
begin(__name__)

_line, _image, _volume = f(3, 5, 6), f(3, 5, 6, 6), f(2, 3, 4, 4, 4)
for _kind in ("reflection", "replication"):
    for _count, _x in ((1, _line), (3, _volume)):
        _op = getattr(aten, f"{_kind}_pad{_count}d").default
        sample(_op, _x, [1, 2] * _count)
        sample(_op, _x[0], [1, 2] * _count)
    for _count, _x in ((1, _line), (2, _image), (3, _volume)):
        _made = getattr(aten, f"{_kind}_pad{_count}d")(_x, [1, 2] * _count)
        sample(getattr(aten, f"{_kind}_pad{_count}d_backward").default, f(*_made.shape), _x, [1, 2] * _count)
sample(aten.avg_pool1d.default, _line, [2], [2])
sample(aten.max_pool1d.default, _line, [2], [2])
sample(aten.adaptive_avg_pool1d.default, _line, [3])
_made, _at = aten.max_pool2d_with_indices(_image, [2, 2])
sample(aten.max_unpool2d.default, _made, _at, [6, 6])
_made, _at = aten.adaptive_max_pool2d(_image, [3, 3])
sample(aten.adaptive_max_pool2d_backward.default, f(3, 5, 3, 3), _image, _at)
sample(aten._upsample_bilinear2d_aa.default, _image, [9, 3], False)
_made, _at = aten.max_pool3d_with_indices(_volume, [2, 2, 2])
sample(aten.max_unpool3d.default, _made, _at, [4, 4, 4], [2, 2, 2], [0, 0, 0])
_sizes = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
sample(aten.max_pool3d_with_indices_backward.default, f(*_made.shape), _volume, *_sizes, [1, 1, 1], False, _at)
sample(aten.avg_pool3d_backward.default, f(*_made.shape), _volume, *_sizes, False, True, None)
sample(aten._adaptive_avg_pool3d_backward.default, f(2, 3, 2, 2, 2), _volume)
sample(aten.adaptive_max_pool3d.default, _volume, [2, 2, 2])
_made, _at = aten.adaptive_max_pool3d(_volume, [2, 2, 2])
sample(aten.adaptive_max_pool3d_backward.default, f(2, 3, 2, 2, 2), _volume, _at)
_window = ([2, 3], [1, 1], [1, 0], [2, 1])
sample(aten.im2col.default, _image, *_window)
sample(aten.im2col.default, _image[0], *_window)
_made = aten.im2col(_image, *_window)
sample(aten.col2im.default, f(*_made.shape), [6, 6], *_window)
sample(aten.col2im.default, f(*_made.shape[1:]), [6, 6], *_window)
_grid2, _grid3 = f(3, 4, 5, 2), f(2, 2, 3, 5, 3)
sample(aten.grid_sampler_2d.default, _image, _grid2, 0, 0, False)
sample(aten.grid_sampler_3d.default, _volume, _grid3, 0, 1, True)
sample(aten.grid_sampler_2d_backward.default, f(3, 5, 4, 5), _image, _grid2, 0, 0, False, [True, True])
sample(aten.grid_sampler_3d_backward.default, f(2, 3, 2, 3, 5), _volume, _grid3, 0, 0, False, [True, True])
for _op in (aten.upsample_nearest1d, aten._upsample_nearest_exact1d):
    sample(_op.default, _line, [9])
for _op in (aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa):
    sample(_op.default, _image, [9, 3], True)
for _op in (aten._upsample_bilinear2d_aa_backward, aten._upsample_bicubic2d_aa_backward):
    sample(_op.default, f(3, 5, 9, 3), [9, 3], [3, 5, 6, 6], False)
sample(aten.affine_grid_generator.default, f(3, 2, 3), [3, 5, 6, 4], False)
sample(aten.affine_grid_generator.default, f(3, 3, 4), [3, 5, 6, 4, 2], True)
sample(aten.upsample_linear1d.default, _line, [9], True)
sample(aten.upsample_bicubic2d.default, _image, [9, 3], False)
for _op in (aten.upsample_nearest3d, aten._upsample_nearest_exact3d):
    sample(_op.default, _volume, [6, 2, 4])
sample(aten.upsample_trilinear3d.default, _volume, [6, 2, 4], False)
