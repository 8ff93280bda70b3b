"""Convolutions, plain and transposed. Space is small and uneven, so that some tiles are empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.rules.samples.calls import begin, f, sample

aten = torch.ops.aten
begin(__name__)

def convolution(x: Tensor, weight: Tensor, bias: bool, *settings: Any, mask: tuple[bool, ...] = (True, True, True)) -> None:
    """A convolution and its backward."""
    outputs = weight.shape[1] * settings[5] if settings[3] else weight.shape[0]
    b = f(outputs) if bias else None
    sample(aten.convolution.default, x, weight, b, *settings)
    grad = f(*aten.convolution(x, weight, b, *settings).shape)
    sample(aten.convolution_backward.default, grad, x, weight, [outputs] if bias else None, *settings, [*mask[:2], bias and mask[2]])


SAME = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
convolution(f(3, 4, 5, 7), f(5, 4, 3, 3), True, *SAME)
convolution(f(2, 3, 6, 5), f(2, 3, 3, 3), False, [2, 2], *SAME[1:], mask=(True, False, False))
convolution(f(2, 3, 7, 5), f(2, 3, 1, 1), True, [2, 1], [0, 0], *SAME[2:], mask=(False, True, False))
convolution(f(2, 3, 8, 5), f(4, 3, 2, 3), True, [2, 1], [0, 2], [1, 2], *SAME[3:], mask=(True, False, True))
convolution(f(3, 4, 6), f(6, 2, 3), True, [1], [1], [1], False, [0], 2)
convolution(f(2, 5, 7), f(5, 1, 4), True, [1], [3], [1], False, [0], 5)  # depthwise, causal once its tail is cut off
convolution(f(2, 1, 9), f(1, 1, 3), False, [3], [0], [2], False, [0], 1)
convolution(f(1, 2, 4, 3, 5), f(2, 2, 2, 3, 3), True, [1, 1, 2], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1)
convolution(f(3, 4, 5, 4), f(4, 5, 3, 3), True, [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
convolution(f(2, 3, 3, 4), f(3, 2, 3, 2), True, [2, 2], [1, 0], [1, 1], True, [1, 0], 1)
convolution(f(2, 3, 5), f(3, 2, 3), False, [2], [2], [2], True, [1], 1, mask=(True, False, False))
convolution(f(2, 4, 5), f(4, 1, 3), True, [2], [1], [1], True, [1], 4)
convolution(f(2, 4, 5), f(4, 2, 3), True, [2], [1], [1], True, [0], 2, mask=(True, True, True))
