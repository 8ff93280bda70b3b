"""One or more calls of every operator that has a rule, small and uneven: dims of 5 and 7 leave padding on axes of 2 and 3."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

import meshc.ops.norm
import meshc.ops.optim  # noqa: F401
import meshc.ops.parts  # noqa: F401
from meshc.ops.random import seed_step
from tests.rules.brute_force import Sample

aten = torch.ops.aten
ours = torch.ops.meshc
_generator = torch.Generator().manual_seed(0)


def f(*shape: Any) -> Tensor:
    return torch.randn(shape if shape != ((),) else (), generator=_generator, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return f(*shape).abs() + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) < 0.5


SAMPLES: dict[Any, list[Sample]] = defaultdict(list)


def sample(op: Any, *args: Any, refine: dict[int, tuple[int, ...]] | None = None, defined: bool = True, **kwargs: Any) -> None:
    SAMPLES[op].append(Sample(op, args, kwargs, refine or {}, defined))


# ------------------------------------------------------------------------------------------------------------------ contractions

sample(aten.mm.default, f(5, 4), f(4, 7))
sample(aten.mm.default, f(6, 10), f(10, 3), refine={0: (2, 3, 5, 2)})
sample(aten.mm.default, f(5, 1), f(1, 7))
sample(aten.bmm.default, f(3, 4, 5), f(3, 5, 2))
sample(aten.bmm.default, f(1, 4, 5), f(1, 5, 2))
sample(aten.mv.default, f(5, 7), f(7))
sample(aten.dot.default, f(7), f(7))
sample(aten.addmm.default, f(7), f(5, 4), f(4, 7))
sample(aten.addmm.default, f(5, 7), f(5, 4), f(4, 7), beta=2.0, alpha=3.0)
sample(aten.addmm.default, f(1), f(5, 4), f(4, 7))
sample(aten.addmm.default, f(1, 7), f(5, 4), f(4, 7))
sample(aten.baddbmm.default, f(3, 5, 2), f(3, 5, 4), f(3, 4, 2), beta=0.5)
sample(aten.baddbmm.default, f(3, 1, 2), f(3, 5, 4), f(3, 4, 2))
sample(aten.baddbmm.default, f(5, 2), f(3, 5, 4), f(3, 4, 2))

# -------------------------------------------------------------------------------------------------------------------- reductions

sample(aten.sum.dim_IntList, f(5, 4, 3), [1])
sample(aten.sum.dim_IntList, f(5, 4, 3), [0, -1], True)
sample(aten.sum.dim_IntList, f(6, 4), [0], refine={0: (3, 2, 4)})
sample(aten.sum.dim_IntList, i(9, 5, 4), [0])
sample(aten.sum.dim_IntList, b(5, 4), [0])
sample(aten.sum.dim_IntList, f(5, 4), None)
sample(aten.sum.default, f(5, 4))
sample(aten.sum.default, f(5, 4), dtype=torch.float32)
sample(aten.mean.dim, f(5, 4, 3), [1])
sample(aten.mean.dim, f(5, 4, 3), [0, -1], True)
sample(aten.mean.dim, f(6, 4), [0], refine={0: (3, 2, 4)})
sample(aten.mean.default, f(5, 4))
sample(aten.mean.dim, f(5, 4).float(), [0], dtype=torch.float64)
sample(aten.amax.default, f(5, 4, 3) - 5, [1])
sample(aten.amax.default, f(5, 4) - 5, [-1, 0], True)
sample(aten.amax.default, -1 - i(9, 5, 4), [0])
sample(aten.amax.default, torch.zeros(5, 3, dtype=torch.bool), [0])
sample(aten.amin.default, f(5, 4, 3) + 5, [1])
sample(aten.amin.default, 5 + i(9, 5, 4), [0])
sample(aten.max.default, f(5, 4) - 5)
sample(aten.min.default, f(5, 4) + 5)
for op in (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin):
    sample(op.default, f(5, 4), 1)
for op in (aten.any, aten.all):
    sample(op.dim, b(5, 4), 1)
    sample(op.dims, b(5, 4, 3), [0, 1], True)
    sample(op.default, b(5, 4))
for op in (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.prod.dim_int):
    sample(op, f(5, 4), 1)
    sample(op, f(5, 4), 0, True)
sample(aten.argmax.default, f(5, 4))
sample(aten.prod.default, f(5, 4))
sample(aten.logsumexp.default, f(5, 4, 3), [1, -1])
for op in (aten.var, aten.std):
    sample(op.correction, f(5, 4), [1])
    sample(op.correction, f(5, 4), [0], correction=0, keepdim=True)
    sample(op.correction, f(5, 4))
sample(aten.linalg_vector_norm.default, f(5, 4), 2, [1], True)
sample(aten.linalg_vector_norm.default, f(5, 4), 1)
sample(aten.norm.ScalarOpt_dim, f(5, 4), 2, [0])
sample(aten.sort.default, f(5, 4), 0, True)
sample(aten.sort.stable, f(5, 4), stable=True, dim=1)
sample(aten.topk.default, f(5, 4), 2)
sample(aten.topk.default, f(5, 4), 5, 0)
for op in (aten.tril, aten.triu):
    sample(op.default, f(2, 5, 7))
    sample(op.default, f(5, 6), -1, refine={0: (5, 3, 2)})
    sample(op.default, i(9, 5, 4), 2)
sample(aten._softmax.default, f(5, 4, 3), 1, False)
sample(aten._softmax_backward_data.default, f(5, 4), positive(5, 4), -1, torch.float64)
sample(aten._log_softmax.default, f(5, 4, 7), 1, False)
sample(aten._log_softmax.default, f(5, 6), -1, False, refine={0: (5, 3, 2)})
sample(aten._log_softmax_backward_data.default, f(5, 7), f(5, 7).log_softmax(-1), -1, torch.float64)
sample(aten._log_softmax_backward_data.default, f(5, 6), f(5, 6).log_softmax(-1), -1, torch.float64, refine={0: (5, 3, 2)})

# ------------------------------------------------------------------------------------------------------------------------ layouts

sample(aten.view.default, f(6, 5), [2, 3, 5])
sample(aten.view.default, f(3, 5, 4), [15, 4])
sample(aten.view.default, f(4, 6), [8, 3])
sample(aten.view.default, f(4, 9), [6, 6])
sample(aten.view.default, f(3, 4), [1, 3, 1, 4])
sample(aten.view.default, f(5, 7), [35])
sample(aten._unsafe_view.default, f(3, 5, 4), [15, 4])
sample(aten.reshape.default, f(3, 5, 4), [3, 20])
sample(aten.permute.default, f(3, 5, 4), [2, 0, -2])
sample(aten.transpose.int, f(3, 5, 4), 0, -1)
sample(aten.t.default, f(3, 5))
sample(aten.t.default, f(5))
sample(aten.unsqueeze.default, f(3, 5), 1)
sample(aten.squeeze.dim, f(3, 1, 5), 1)
sample(aten.squeeze.dim, f(3, 5), 1)
sample(aten.squeeze.dims, f(1, 3, 1, 5), [0, 2])
sample(aten.squeeze.default, f(1, 3, 1, 5))
sample(aten.expand.default, f(3, 1, 5), [4, 3, 7, 5])
sample(aten.expand.default, f(3, 1), [-1, 4])
sample(aten.slice.Tensor, f(5, 4), 1, 0, 9223372036854775807)
sample(aten.slice.Tensor, f(6, 4), 0, 2, 4, refine={0: (3, 2, 4)})
sample(aten.slice.Tensor, f(30, 2), 0, 10, 20, refine={0: (3, 5, 2, 2)})
sample(aten.slice.Tensor, f(6, 4), 0, 1, 4)
sample(aten.slice.Tensor, f(6, 4), 0, 0, 6, 2)
sample(aten.slice.Tensor, f(6, 4), 0, -2)
sample(aten.slice.Tensor, f(6, 4), 1, 3, 4)
sample(aten.select.int, f(5, 4, 3), 1, -1)
sample(aten.split.Tensor, f(30, 4), 10, refine={0: (3, 5, 2, 4)})
sample(aten.split.Tensor, f(4, 6), 2, -1)
sample(aten.split.Tensor, f(4, 7), 3, 1)
sample(aten.split_with_sizes.default, f(4, 6), [3, 3], 1)
sample(aten.split_with_sizes.default, f(4, 6), [1, 5], 1)
sample(aten.cat.default, [f(5, 4), f(5, 4)], 1)
sample(aten.cat.default, [f(5, 3), f(5, 3)], -1, refine={~0: (5, 2, 3)})
sample(aten.cat.default, [f(5, 4), f(2, 4)])
sample(aten.cat.default, [f(5, 1), f(5, 1), f(5, 1)], 1)
sample(aten.stack.default, [f(5, 4), f(5, 4), f(5, 4)], 1)
sample(aten.stack.default, [f(5, 4), f(5, 4)], -1)
sample(aten.unbind.int, f(3, 5, 4))
sample(aten.unbind.int, f(3, 5, 2), -1)
sample(aten.repeat.default, f(5, 4), [1, 2])
sample(aten.repeat.default, f(5, 1), [3, 1, 4])
sample(aten.roll.default, f(5, 4), [2], [0])
sample(aten.roll.default, f(5, 4), [3])
sample(aten.view_as_complex.default, f(5, 4, 2))
sample(aten.view_as_real.default, torch.complex(f(5, 4), f(5, 4)))
sample(aten.slice_backward.default, f(2, 4), [6, 4], 0, 2, 4, 1, refine={~0: (3, 2, 4)})
sample(aten.slice_backward.default, f(3, 4), [6, 4], 0, 0, 6, 2)
sample(aten.slice_backward.default, f(6, 3), [6, 4], 1, 1, 9223372036854775807, 1)
sample(aten.slice_backward.default, f(6, 4), [6, 4], 1, 0, 9223372036854775807, 1)
sample(aten.select_backward.default, f(5, 3), [5, 4, 3], 1, 2)
sample(aten.constant_pad_nd.default, f(5, 4), [1, 2], 0.0)
sample(aten.constant_pad_nd.default, f(5, 4), [1, 2], 3.0)
sample(aten.constant_pad_nd.default, f(5, 4), [0, 0, -1, 1], 0.0)
sample(aten.flip.default, f(5, 4), [-1])
for op in (aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy):
    sample(op.default, f(5, 4))
sample(aten._to_copy.default, f(5, 4).float(), dtype=torch.float64)
sample(aten._to_copy.default, f(5, 4), dtype=torch.bfloat16)
sample(aten._to_copy.default, 3 * f(5, 4), dtype=torch.int64)
sample(aten._to_copy.default, i(2, 5, 4), dtype=torch.bool)

# ------------------------------------------------------------------------------------------------------------------------ indices

sample(aten.embedding.default, f(7, 4), i(7, 3, 5))
sample(aten.embedding.default, f(7, 4), i(7, 3, 5), 2)
sample(aten.embedding.default, f(10, 4), i(10, 5), refine={0: (5, 2, 4)})
sample(aten.embedding_dense_backward.default, f(3, 5, 4), i(7, 3, 5), 7, -1, False)
sample(aten.embedding_dense_backward.default, f(9, 4), i(3, 9), 3, 1, False)
sample(ours.take.default, f(3, 5, 7), i(7, 3, 5), -100)
sample(ours.take.default, f(5, 7), torch.tensor([0, 6, -100, 3, 2]), -100)
sample(ours.take.default, f(5, 6), i(6, 5), 2, refine={0: (5, 3, 2)})
sample(ours.take_backward.default, f(3, 5), i(7, 3, 5), -100, 7)
sample(ours.take_backward.default, f(5), torch.tensor([0, 6, -100, 3, 2]), -100, 7)
sample(ours.take_backward.default, f(5), i(6, 5), 2, 6, refine={~0: (5, 3, 2)})

sample(aten.gather.default, f(3, 5, 7), -1, i(7, 3, 5, 4))
sample(aten.gather.default, f(5, 7), 0, i(5, 2, 3))
sample(aten.gather.default, f(5, 6), 1, i(6, 5, 1), refine={0: (5, 3, 2)})
sample(aten.gather.default, b(5, 7), 1, i(7, 5, 3))
sample(aten.scatter.src, f(5, 7), 1, i(7, 5, 3).sort(1)[0] * 0 + torch.tensor([4, 0, 6]), f(5, 3))
sample(aten.scatter.src, f(5, 7), 0, torch.tensor([[2, 1, 0]]), f(1, 3))
sample(aten.scatter.value, f(5, 7), -1, i(7, 5, 3), 2.0)
sample(aten.scatter_add.default, f(5, 7), 1, i(7, 5, 3), f(5, 3))
sample(aten.index_select.default, f(5, 7, 3), 1, i(7, 4))
sample(aten.index_select.default, f(6, 4), 0, i(6, 5), refine={0: (3, 2, 4)})
sample(aten.index_select.default, b(5, 7), -1, i(7, 4))
sample(aten.index_add.default, f(5, 7), 1, i(7, 3), f(5, 3))
for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
    sample(op, f(5, 7, 3), [None, i(7, 4)])
    sample(op, f(5, 7, 3), [i(5, 4, 2), i(7, 2)])
    sample(op, f(5, 7, 3), [i(5, 4), None, i(3, 4)])
    sample(op, f(5, 7, 3), [None, i(7, 4, 1), i(3, 1, 2)])
for op in (aten.index_put.default, aten._unsafe_index_put.default):
    sample(op, f(5, 7), [torch.tensor([3, 0, 4])], f(3, 7))
    sample(op, f(5, 7), [torch.tensor([3, 0, 4])], f(3, 7), True)
    sample(op, f(5, 7), [None, i(7, 4)], f(5, 4), True)
    sample(op, f(5, 7), [None, i(7, 4)], f(1), True)
    sample(op, f(5, 7, 3), [i(5, 4, 2), i(7, 2)], f(4, 2, 3), True)

# ----------------------------------------------------------------------------------------------------------------- normalisation

_x, _w = f(3, 5, 4), f(4)
_, _mean, _rstd = aten.native_layer_norm(_x, [4], _w, _w, 1e-5)
sample(aten.native_layer_norm.default, _x, [4], _w, f(4), 1e-5)
sample(aten.native_layer_norm.default, _x, [5, 4], None, None, 1e-5)
sample(aten.native_layer_norm_backward.default, f(3, 5, 4), _x, [4], _mean, _rstd, _w, f(4), [True, True, True])
sample(aten.native_layer_norm_backward.default, f(3, 5, 4), _x, [4], _mean, _rstd, None, None, [True, False, False])
sample(aten.native_layer_norm_backward.default, f(3, 5, 4), _x, [4], _mean, _rstd, _w, None, [True, True, False])

# --------------------------------------------------------------------------------------------------------------------- attention

for _causal, _bias in ((False, None), (True, None), (False, f(1, 1, 5, 7)), (False, f(2, 3, 5, 7)), (False, f(2, 1, 1, 7))):
    _keys = 5 if _causal else 7
    _q, _k, _v = f(2, 3, 5, 4), f(2, 3, _keys, 4), f(2, 3, _keys, 4)
    _out, _lse = ours.attention(_q, _k, _v, _bias, _causal, 0.5)
    sample(ours.attention.default, _q, _k, _v, _bias, _causal, 0.5)
    sample(ours.attention_backward.default, f(2, 3, 5, 4), _q, _k, _v, _bias, _out, _lse, _causal, 0.5)

# ------------------------------------------------------------------------------------------------------------------ convolutions

_ARGS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
sample(aten.convolution.default, f(3, 4, 5, 5), f(5, 4, 3, 3), f(5), *_ARGS)
sample(aten.convolution.default, f(3, 4, 5, 5), f(5, 4, 3, 3), None, [2, 2], *_ARGS[1:])
sample(aten.convolution.default, f(3, 4, 6), f(6, 2, 3), f(6), [1], [1], [1], False, [0], 2)
sample(aten.convolution.default, f(3, 4, 5, 5), f(4, 5, 3, 3), f(5), [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
sample(aten.convolution_backward.default, f(3, 5, 5, 5), f(3, 4, 5, 5), f(5, 4, 3, 3), [5], *_ARGS, [True, True, True])
sample(aten.convolution_backward.default, f(3, 5, 5, 5), f(3, 4, 5, 5), f(5, 4, 3, 3), None, *_ARGS, [True, True, False])
sample(aten.convolution_backward.default, f(3, 5, 5, 5), f(3, 4, 5, 5), f(5, 4, 3, 3), [0], *_ARGS, [False, True, False])
sample(aten.convolution_backward.default, f(3, 6, 6), f(3, 4, 6), f(6, 2, 3), [6], [1], [1], [1], False, [0], 2, [True, True, True])
_pool = f(3, 4, 6, 6)
_pooled, _indices = aten.max_pool2d_with_indices(_pool, [2, 2], [2, 2])
sample(aten.max_pool2d_with_indices.default, _pool, [2, 2], [2, 2])
_grad = f(3, 4, 3, 3)
sample(aten.max_pool2d_with_indices_backward.default, _grad, _pool, [2, 2], [2, 2], [0, 0], [1, 1], False, _indices)
sample(aten.avg_pool2d.default, _pool, [2, 2], [2, 2])
sample(aten.avg_pool2d.default, f(4, 6, 6), [2, 2], [2, 2])
sample(aten.avg_pool2d_backward.default, _grad, _pool, [2, 2], [2, 2], [0, 0], False, True, None)
sample(aten._adaptive_avg_pool2d.default, _pool, [3, 3])
sample(aten._adaptive_avg_pool2d_backward.default, _grad, _pool)
sample(aten.adaptive_max_pool2d.default, _pool, [3, 3])
sample(aten.max_pool3d_with_indices.default, f(3, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2])
sample(aten.avg_pool3d.default, f(3, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2])
sample(aten._adaptive_avg_pool3d.default, f(3, 2, 4, 4, 4), [2, 2, 2])
sample(aten.reflection_pad2d.default, _pool, [1, 1, 2, 2])
sample(aten.replication_pad2d.default, _pool, [1, 1, 2, 2])
sample(aten.upsample_nearest2d.default, _pool, [12, 12])
sample(aten.upsample_nearest2d.vec, _pool, None, [2.0, 2.0])
sample(aten.upsample_bilinear2d.default, _pool, [12, 12], False)
sample(aten.upsample_bilinear2d.vec, _pool, [12, 12], True, None)
sample(aten.upsample_nearest2d_backward.default, f(3, 4, 12, 12), [12, 12], [3, 4, 6, 6])
sample(aten.upsample_bilinear2d_backward.default, f(3, 4, 12, 12), [12, 12], [3, 4, 6, 6], False)

# ---------------------------------------------------------------------------------------------------------------------- creation

_F64 = {"dtype": torch.float64, "device": torch.device("cpu")}
sample(aten.full.default, [5, 4], 3.0, **_F64)
sample(aten.zeros.default, [5, 4], **_F64)
sample(aten.ones.default, [5, 4], **_F64)
sample(aten.empty.memory_format, [5, 4], **_F64, defined=False)
sample(aten.scalar_tensor.default, 3.0, **_F64)
sample(aten.new_zeros.default, f(5, 2), [5, 4])
sample(aten.new_ones.default, f(5, 2), [5, 4])
sample(aten.new_full.default, f(5, 2), [5, 4], 2.5)
sample(aten.new_empty.default, f(5, 2), [5, 4], defined=False)
sample(aten.arange.default, 7, device=torch.device("cpu"))
sample(aten.arange.default, 7, dtype=torch.float64)
sample(aten.arange.start, 2, 9)
sample(aten.arange.start_step, 2, 9, 3)
sample(aten.arange.start_step, 9, 0, -2)
sample(aten.arange.default, 12, refine={~0: (3, 4)})

# --------------------------------------------------------------------------------------------------------------------- optimizers

_numbers = [torch.tensor(number, dtype=torch.float64) for number in (0.1, 0.9, 0.99, 1e-8, 0.01)]
_step = torch.tensor(3.0)
sample(ours.adam.default, f(5, 4), f(5, 4), f(5, 4), positive(5, 4), _step, *_numbers, True, False)
sample(ours.adam.default, f(()), f(()), f(()), positive(), _step, *_numbers, False, True)
sample(ours.adam_amsgrad.default, f(7), f(7), f(7), positive(7), positive(7), _step, *_numbers, True, False)
sample(ours.sgd.default, f(6, 5), f(6, 5), f(6, 5), torch.tensor(0.0), *_numbers[:4], True, False, refine={0: (3, 2, 5)})
sample(ours.sgd_plain.default, f(5, 4), f(5, 4), *_numbers[:2], False)
sample(ours.square_sum.default, f(5, 4))
sample(ours.sum_of_parts.default, f(5, 4))
sample(ours.sum_of_parts.default, f(6, 5), refine={0: (3, 2, 5)})
sample(ours.square_sum.default, f(6, 5), refine={0: (3, 2, 5)})

# -------------------------------------------------------------------------------------------------------------------- elementwise

sample(aten.add.Tensor, f(5, 4), f(4))
sample(aten.add.Tensor, f(3, 1, 5), f(4, 1), alpha=2)
sample(aten.sub.Tensor, f(5, 4), f(5, 4))
sample(aten.mul.Tensor, f(5, 4), f(()))
sample(aten.div.Tensor, f(5, 4), f(()))
sample(aten.div.Tensor_mode, f(5, 4), f(()), rounding_mode="floor")
sample(aten.native_dropout_backward.default, f(5, 4), b(5, 4), 2.0)
sample(aten.gelu_backward.default, f(5, 4), f(5, 4), approximate="tanh")
for op in (aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward, aten.hardswish_backward, aten.hardsigmoid_backward):
    sample(op.default, f(5, 4), f(5, 4))
sample(aten.mish_backward.default, f(5, 4), f(5, 4))
sample(aten.threshold_backward.default, f(5, 4), f(5, 4), 0.0)
sample(aten.elu_backward.default, f(5, 4), 1.0, 1.0, 1.0, False, f(5, 4))
sample(aten.leaky_relu_backward.default, f(5, 4), f(5, 4), 0.1, False)
sample(aten.hardtanh_backward.default, f(5, 4), f(5, 4), -1.0, 1.0)
sample(aten.softplus_backward.default, f(5, 4), f(5, 4), 1.0, 20.0)
sample(aten.hardswish.default, f(5, 4))
sample(aten._prelu_kernel.default, f(5, 4), f(1, 4))
sample(aten._prelu_kernel_backward.default, f(5, 4), f(5, 4), f(1, 4))
sample(aten.copy.default, f(5, 4), f(4))
sample(aten.fill.Scalar, f(5, 4), 2.0)
sample(aten.complex.default, f(5, 4), f(5, 4))
sample(aten.where.self, b(5, 1), f(4), f(5, 4))
sample(aten.where.self, b(5, 4), f(5, 4), f(5, 4), refine={0: (5, 2, 2)})
sample(aten.where.ScalarOther, b(5, 4), f(4), 2.0)
sample(aten.where.ScalarSelf, b(5, 4), 2.0, f(5, 4))
sample(aten.masked_fill.Scalar, f(5, 4), b(4), -math.inf)
sample(aten.masked_fill.Tensor, f(5, 4), b(5, 1), f(()))
for op in (aten.zeros_like, aten.ones_like):
    sample(op.default, f(5, 4))
sample(aten.full_like.default, f(5, 4), 2.0)
sample(aten.empty_like.default, f(5, 4), defined=False)
sample(aten.glu.default, f(5, 4))
sample(aten.glu.default, f(6, 5), 0)
sample(aten.glu_backward.default, f(5, 2), f(5, 4), -1)
sample(ours.dropout_backward.default, f(5, 4), b(5, 4), 0.3)

# ------------------------------------------------------------------------------------------------------------------------- random

_seed = seed_step(3, 5)
for _shape in ((5, 4), (7,)):
    _zeros = [0] * len(_shape)
    sample(ours.dropout.default, f(*_shape), _seed, 2, 0.3, _shape, _shape, _zeros)
    sample(ours.uniform.default, _seed, 2, _shape, _shape, _zeros, torch.float64)
    sample(ours.normal.default, _seed, 2, _shape, _shape, _zeros, torch.float64)
    sample(ours.keep_mask.default, _seed, 2, 0.3, _shape, _shape, _zeros)
sample(ours.dropout.default, f(6, 5), _seed, 2, 0.3, (6, 5), (6, 5), [0, 0], refine={0: (3, 2, 5)})
sample(ours.uniform.default, _seed, 2, (6, 5), (6, 5), [0, 0], torch.float64, refine={~0: (3, 2, 5)})


def pointwise_operators() -> list[Any]:
    """Every ATen operator that torch tags as pointwise and that writes into nothing: the rules take torch's word for these."""
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            writes = op._schema.is_mutable or any(argument.is_out for argument in op._schema.arguments)
            if torch.Tag.pointwise in op.tags and not writes:
                found.append(op)
    return found


def pointwise_sample(op: Any) -> Sample | None:
    """A call with tensors that broadcast, of the first kind that the operator takes; None if it takes none of them."""
    for kind in (positive, lambda *shape: i(4, *shape) + 1, b):
        shapes = iter(((5, 4), (4,), (5, 1)))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in op._schema.arguments:
            type_ = str(argument.type)
            if argument.kwarg_only and not argument.has_default_value():
                kwargs[argument.name] = "floor" if argument.name == "rounding_mode" else 1
            elif type_ in ("Tensor", "Optional[Tensor]"):
                args.append(kind(*next(shapes)))
            elif argument.name in ("min", "max"):
                args.append(1 if argument.name == "min" else 2)
            elif not argument.has_default_value():
                args.append({"number": 2, "int": 2, "float": 0.5}[type_])
            elif not argument.kwarg_only:
                break
        try:
            made = op(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        if all(isinstance(item, Tensor) for item in (made if isinstance(made, tuple) else (made,))):
            return Sample(op, tuple(args), kwargs)
    return None


__all__ = ["SAMPLES", "pointwise_operators", "pointwise_sample"]
