"""Entry by entry."""

from __future__ import annotations

import math

import torch

from tests.rules.samples.calls import b, begin, f, sample

aten = torch.ops.aten
ours = torch.ops.meshc
begin(__name__)

sample(aten.add.Tensor, f(5, 4), f(4))
sample(aten.add.Tensor, f(3, 1, 5), f(4, 1), alpha=2)
sample(aten.sub.Tensor, f(5, 4), f(5, 4))
sample(aten.sub.Tensor, 1.0, f(5, 4))
sample(aten.sub.Tensor, f(5, 4), 1.0)
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
sample(aten.zero.default, f(5, 4))
sample(aten._conj.default, torch.complex(f(5, 4), f(5, 4)))
sample(aten.polar.default, f(5, 4), f(5, 4))
sample(aten.floor_divide.default, f(5, 4), f(4))
sample(aten.log_sigmoid_backward.default, f(5, 4), f(5, 4), f(5, 4))
sample(aten.rrelu_with_noise_backward.default, f(5, 4), f(5, 4), f(5, 4), 0.1, 0.3, True, False)
sample(aten.rsub.Tensor, f(5, 4), f(4))
sample(aten.rsub.Scalar, f(5, 4), 2.0)
sample(aten.log_sigmoid_forward.default, f(5, 4))
for _number in (-0.5, 0.5):
    for op in (aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor, aten.leaky_relu.default, aten.elu.default):
        sample(op, f(5, 4), _number)
    sample(aten.lerp.Scalar, f(5, 4), f(4), _number)
sample(aten.lerp.Scalar, f(5, 4), f(4), 1.5)
sample(aten.lerp.Tensor, f(5, 4), f(4), f(5, 1))
sample(aten.addcdiv.default, f(5, 4), f(4), f(5, 1), value=-0.5)
for _number in (-1.0, 1.0):
    sample(aten.threshold.default, f(5, 4), 0.1, _number)
for op in (aten.log, aten.log2, aten.log10, aten.log1p, aten.sqrt, aten.acosh, aten.rsqrt):
    sample(op.default, 2 * f(5, 4))
