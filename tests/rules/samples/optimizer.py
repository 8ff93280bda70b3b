"""Updates."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, positive, sample

ours = torch.ops.meshc
begin(__name__)

_numbers = [torch.tensor(number, dtype=torch.float64) for number in (0.1, 0.9, 0.99, 1e-8, 0.01)]
_step = torch.tensor(3.0)
sample(ours.adam.default, f(5, 4), f(5, 4), f(5, 4), positive(5, 4), _step, *_numbers, True, False)
sample(ours.adam.default, f(()), f(()), f(()), positive(), _step, *_numbers, False, True)
sample(ours.adam_amsgrad.default, f(7), f(7), f(7), positive(7), positive(7), _step, *_numbers, True, False)
sample(ours.sgd.default, f(6, 5), f(6, 5), f(6, 5), torch.tensor(0.0), *_numbers[:4], True, False, refine={0: (3, 2, 5)})
sample(ours.sgd_plain.default, f(5, 4), f(5, 4), *_numbers[:2], False)
sample(ours.square_sum.default, f(5, 4))
_odd = f(6, 5).index_fill(0, torch.tensor(4), torch.inf)
sample(ours.non_finite.default, _odd, refine={0: (3, 2, 5)})
sample(ours.non_finite.default, f(5, 4))
sample(ours.widen_sum.default, f(6, 5), torch.float64, refine={0: (3, 2, 5)})
sample(ours.sum_of_parts.default, f(5, 4))
sample(ours.sum_of_parts.default, f(6, 5), refine={0: (3, 2, 5)})
sample(ours.square_sum.default, f(6, 5), refine={0: (3, 2, 5)})

_seed = torch.tensor([3, 1])
_state = f(6, 5).to(torch.bfloat16)
sample(ours.round_state.default, _state, f(6, 5), _seed, "w/exp_avg", [6, 5], [6, 5], [0, 0], refine={0: (3, 2, 5)})
sample(ours.round_state.default, f(2).to(torch.bfloat16), f(2), _seed, "b/exp_avg", [2], [2], [0])
sample(ours.round_param.default, _state, f(6, 5))
sample(ours.join_master.default, f(6, 5), _state)
sample(ours.update_if.default, f(6, 5), f(6, 5), torch.tensor(True), refine={0: (3, 2, 5)})
sample(ours.update_if.default, f(6, 5), f(6, 5), torch.tensor(False))

# of blocks that lie on several ranks, and of a last dim in two factors
_tile = [3, 515], [3, 515], [0, 0], 1
_codes = torch.randint(256, (3, 515), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
_scale = torch.ops.meshc.block_scale(f(3, 515), *_tile)
sample(ours.block_scale.default, f(3, 515), *_tile)
sample(ours.block_scale.default, f(514), [514], [514], [0], 1)
sample(ours.block_scale.default, f(2, 6 * 128), [2, 768], [2, 768], [0, 0], 1, refine={0: (2, 6, 128)})
sample(ours.decode_state.default, _codes, _scale, True, torch.float32, *_tile)
sample(ours.decode_state.default, _codes, _scale, False, torch.float64, *_tile)
sample(ours.encode_state.default, _codes, f(3, 515), _scale + 4, _seed, "w/exp_avg.codes", True, *_tile)
_tile = [2, 768], [2, 768], [0, 0], 1
_codes = _codes.flatten()[: 2 * 768].view(2, 768)
sample(ours.encode_state.default, _codes, f(2, 768), f(2, 3).float().abs(), _seed, "w/v.codes", False, *_tile, refine={0: (2, 6, 128)})
