"""Contexts that make torch's batch norms traceable: running statistics averaged over calls, and `nn.SyncBatchNorm` as a plain batch norm.

With `momentum=None`, which `torch.optim.swa_utils.update_bn` sets:

    torch:   factor = 1 / float(counter)           a Python number, which no graph has
    traced:  factor = 1 / counter                  running = (1 - factor) running + factor of this batch's

The operator itself computes the batch's statistics, with a momentum of 1 into tensors of zeros. The running statistics are written before
the operator saves anything for backward, as in torch's own call, which a checkpointed region may end with.

`nn.SyncBatchNorm` takes statistics over the rows of all ranks, by collectives of its own, on CUDA alone. A compiled model's batch norm
reduces over the whole batch anyway, so it is traced as a plain batch norm.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from meshc.replacements import replace_targets

_plain = _BatchNorm.forward


def synced_norms() -> AbstractContextManager[None]:
    """A context in which `nn.SyncBatchNorm.forward` is that of a plain batch norm."""
    return replace_targets(synced_batch_norm=_plain)


def averaged_norms() -> AbstractContextManager[None]:
    """A context in which the forward of torch's batch norms is `_forward`."""
    return replace_targets(batch_norm=_forward, synced_batch_norm=_forward)


def _forward(self: Any, input: Tensor) -> Tensor:
    averages = self.momentum is None and self.training and self.track_running_stats
    if not averages or self.num_batches_tracked is None:
        return _plain(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    factor = self.num_batches_tracked.to(torch.float64).reciprocal()
    size, kind = self.running_mean.shape, {"dtype": self.running_mean.dtype, "device": self.running_mean.device}
    mean, var = torch.zeros(size, **kind), torch.zeros(size, **kind)
    functional.batch_norm(input.detach(), mean, var, None, None, True, 1.0, self.eps)
    for running, found in ((self.running_mean, mean), (self.running_var, var)):
        running.copy_(running * (1 - factor) + found * factor)
    return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
