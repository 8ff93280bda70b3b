"""Bags, segments, groups of rows, places in sorted rows."""

from __future__ import annotations

import torch

import meshc.ops.grouped_mm  # noqa: F401
import meshc.ops.routed_mm  # noqa: F401
from tests.rules.samples.calls import begin, f, i, sample

aten = torch.ops.aten
ours = torch.ops.meshc
begin(__name__)

_rows, _offsets = i(7, 9), torch.tensor([0, 2, 2, 7, 8])
for _mode in (0, 1, 2):
    sample(aten._embedding_bag.default, f(7, 4), _rows, _offsets, False, _mode)
    sample(aten._embedding_bag_forward_only.default, f(7, 4), _rows, _offsets, False, _mode)
sample(aten._embedding_bag.default, f(7, 4), _rows, _offsets, False, 0, False, f(9))
for _mode in (0, 1, 2):
    _, _bag, _sizes, _maxima = aten._embedding_bag(f(7, 4), _rows, _offsets, False, _mode)
    _scalars = (7, False, _mode)
    sample(aten._embedding_bag_backward.default, f(5, 4), _rows, _offsets, _bag, _sizes, _maxima, *_scalars, False, None)
    sample(aten._embedding_bag_dense_backward.default, f(5, 4), _rows, _bag, _sizes, _maxima, *_scalars, None)
sample(aten._embedding_bag_per_sample_weights_backward.default, f(5, 4), f(7, 4), _rows, _offsets, _bag, 0)
_data, _lengths, _ends = f(7, 4), torch.tensor([2, 1, 0, 4]), torch.tensor([0, 2, 3, 3, 7])
for _how in ("sum", "mean", "max"):
    sample(aten.segment_reduce.default, _data, _how, lengths=_lengths, unsafe=True)
    sample(aten.segment_reduce.default, _data, _how, offsets=_ends, unsafe=True)
    _made = aten.segment_reduce(_data, _how, lengths=_lengths, unsafe=True)
    sample(aten._segment_reduce_backward.default, f(4, 4), _made, _data, _how, lengths=_lengths)
_ends_of_runs = torch.tensor([8, 16], dtype=torch.int32)
sample(aten._grouped_mm.default, f(16, 16).bfloat16() / 4, f(2, 16, 24).bfloat16(), _ends_of_runs)
sample(aten._grouped_mm.default, f(8, 16).bfloat16() / 4, f(16, 16).bfloat16(), _ends_of_runs)
sample(aten._grouped_mm.default, f(2, 8, 16).bfloat16() / 4, f(2, 16, 24).bfloat16())
_runs = torch.tensor([2, 2, 7], dtype=torch.int32)
sample(ours.grouped_mm.default, f(7, 5), f(3, 5, 4), _runs)
sample(ours.grouped_mm.default, f(9, 6), f(3, 6, 10), _runs.long(), refine={0: (9, 2, 3), ~0: (9, 2, 5)})
sample(ours.grouped_outer.default, f(7, 5), f(7, 4), _runs)
sample(ours.grouped_outer.default, f(9, 6), f(9, 10), _runs, refine={0: (9, 2, 3), 1: (9, 2, 5)})
_choice = torch.tensor([2, 0, 2, 3, -1, 0, 2])
sample(ours.routed_mm.default, f(7, 5), f(3, 5, 4), _choice)
sample(ours.routed_mm.default, f(6, 6), f(3, 6, 10), _choice[:6], refine={0: (2, 3, 2, 3), ~0: (2, 3, 2, 5)})
sample(ours.routed_outer.default, f(7, 5), f(7, 4), _choice, 3)
sample(ours.routed_outer.default, f(6, 6), f(6, 10), _choice[:6], 3, refine={0: (2, 3, 2, 3), 1: (2, 3, 2, 5)})
sample(aten.searchsorted.Tensor, f(7).sort()[0], f(5, 4))
sample(aten.searchsorted.Tensor, f(5, 7).sort()[0], f(5, 4), right=True)
sample(aten.bucketize.Tensor, f(5, 4), f(7).sort()[0])
sample(aten.bucketize.Tensor, f(7, 4), f(5).sort()[0], right=True)
sample(aten.bucketize.Tensor, i(9, 4), i(9, 5).sort()[0], out_int32=True)
sample(aten.bucketize.Tensor, torch.tensor([9.0, float("inf"), float("nan"), -1.0]), f(5).float().sort()[0], right=True)
