"""What is made of nothing."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, sample

aten = torch.ops.aten
begin(__name__)

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
sample(aten.empty_strided.default, [5, 4], [1, 5], **_F64, defined=False)
sample(aten.empty_permuted.default, [5, 4], [1, 0], **_F64, defined=False)
sample(aten.new_empty_strided.default, f(5, 2), [5, 4], [1, 5], defined=False)
