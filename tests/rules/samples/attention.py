"""Attention."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, sample

ours = torch.ops.meshc
begin(__name__)

for _causal, _bias in ((False, None), (True, None), (False, f(1, 1, 5, 7)), (False, f(2, 3, 5, 7)), (False, f(2, 1, 1, 7))):
    _keys = 5 if _causal else 7
    _q, _k, _v = f(2, 3, 5, 4), f(2, 3, _keys, 4), f(2, 3, _keys, 4)
    _out, _lse = ours.attention(_q, _k, _v, _bias, _causal, 0.5)
    sample(ours.attention.default, _q, _k, _v, _bias, _causal, 0.5)
    sample(ours.attention_backward.default, f(2, 3, 5, 4), _q, _k, _v, _bias, _out, _lse, _causal, 0.5)

for _keys, _how in ((5, (2, 0)), (5, (4, 0)), (7, (0, 2)), (7, (3, 2))):  # (window, offset)
    _q, _k, _v = f(2, 3, 5, 4), f(2, 3, _keys, 4), f(2, 3, _keys, 4)
    _out, _lse = ours.attention(_q, _k, _v, None, True, 0.5, *_how)
    sample(ours.attention.default, _q, _k, _v, None, True, 0.5, *_how)
    sample(ours.attention_backward.default, f(2, 3, 5, 4), _q, _k, _v, None, _out, _lse, True, 0.5, *_how)

for _causal, _bias, _numbers in (
    (False, None, (0, 0, 0, 0, 7)), (False, f(2, 3, 5, 7), (0, 0, 5, 0, 6)), (False, f(1, 1, 5, 7), (0, 0, 0, 7, 0)),
    (True, None, (0, 0, 5, 0, 7)), (True, None, (0, 0, 5, 3, 4)), (True, None, (3, 2, 5, 7, 7)), (True, None, (0, 0, 0, 7, 7)),
):  # (window, offset, start, first, real)  # fmt: skip
    _q, _k, _v = f(2, 3, 5, 4), f(2, 3, 7, 4), f(2, 3, 7, 4)
    _out, _lse = ours.attention(_q, f(2, 3, 5, 4), f(2, 3, 5, 4), None, True, 0.5)
    sample(ours.attention.default, _q, _k, _v, _bias, _causal, 0.5, *_numbers)
    sample(ours.attention_backward.default, f(2, 3, 5, 4), _q, _k, _v, _bias, _out, _lse, _causal, 0.5, *_numbers)

_draws = torch.tensor([5, 3]), 2, 0.4, [2, 3, 5, 7], [2, 3, 5, 7], [0, 0, 0, 0]
for _drawn in ((), (0, None, *_draws)):
    for _bias, _how in (
        (f(2, 3, 5, 7), (False, 0.5)), (f(1, 3, 5, 7), (False, 0.5)), (f(2, 1, 1, 7), (False, 0.5)), (f(1, 1, 5, 1), (False, 0.5)),
        (None, (False, 0.5)), (None, (True, 0.5, 0, 2)), (None, (True, 0.5, 4, 2)),
    ):  # (causal, scale, window, offset)  # fmt: skip
        _q, _k, _v = f(2, 3, 5, 4), f(2, 3, 7, 4), f(2, 3, 7, 4)
        _how = (*_how, 0, 0)[:4] + (0, *_drawn) if _drawn else _how
        _made = ours.attention(_q, _k, _v, _bias, *_how)
        sample(ours.attention.default, _q, _k, _v, _bias, *_how)
        sample(ours.attention_backward.default, f(2, 3, 5, 4), _q, _k, _v, _bias, *_made, *_how)
        if _bias is not None:
            sample(ours.attention_bias_backward.default, f(2, 3, 5, 4), _q, _k, _v, _bias, *_made, *_how)

for _numbers in ((0, 0, 2, 10), (1, 0, 3, 13), (0, 2, 3, 12), (2, 2, 4, 19)):  # (queries_of, keys_of, ranks, length)
    _q, _k, _v = f(2, 3, 5, 4), f(2, 3, 5, 4), f(2, 3, 5, 4)
    _out, _lse = ours.attention(_q, _k, _v, None, True, 0.5)
    sample(ours.attention_zigzag.default, _q, _k, _v, 0.5, *_numbers)
    sample(ours.attention_zigzag_backward.default, f(2, 3, 5, 4), _q, _k, _v, _out, _lse, 0.5, *_numbers)
sample(ours.attention_merge.default, f(2, 3, 5, 4), f(2, 3, 5), f(2, 3, 5, 4), f(2, 3, 5))
sample(ours.attention_join.default, f(4, 2, 3, 5, 6))
