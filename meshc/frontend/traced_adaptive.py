"""`nn.AdaptiveLogSoftmaxWithLoss` in a traced model: each cluster of classes on all rows, with a mask of those whose target is in it.

    rows = mask.nonzero().squeeze();  if rows.numel() == 0: continue          per_row = log_softmax(tail(where(mask, input, 0)))
    output.index_copy_(0, rows, log_softmax(tail(input[rows])) ...)           output = where(mask, per_row ..., output)

torch gives each tail the rows of its own cluster, whose number is data, and skips a cluster without rows: it has no gradient then, and
zeros here, which an update skips by the same mask (`passes/trace/keep_unchosen.py`). torch checks for targets outside of all classes; a
program does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshc.private import AdaptiveOutput
from meshc.replacements import replace_targets


@contextmanager
def traced_adaptive() -> Iterator[None]:
    """A context in which such a module has no sizes that targets decide."""
    with replace_targets(adaptive_loss=loss_of_clusters, adaptive_prediction=likeliest):
        yield


def loss_of_clusters(self: Any, input_: Tensor, target_: Tensor) -> Any:
    batched = target_.dim() > 0
    x, target = (input_, target_) if batched else (input_.unsqueeze(0), target_.unsqueeze(0))
    if target.dim() != 1 or x.dim() != 2 or x.size(0) != target.size(0):
        raise RuntimeError(f"a row of the input for each target: {list(input_.size())} and {list(target_.size())}")
    output = x.new_zeros(target.size(0))
    column = torch.where(target < self.shortlist_size, target, 0)
    for i, tail in enumerate(self.tail):
        low, high = self.cutoffs[i], self.cutoffs[i + 1]
        mask = (target >= low) & (target < high)
        logs = F.log_softmax(tail(torch.where(mask.unsqueeze(1), x, 0)), dim=1)
        own = logs.gather(1, torch.where(mask, target - low, 0).unsqueeze(1)).squeeze(1)
        output = torch.where(mask, own, output)
        column = torch.where(mask, self.shortlist_size + i, column)
    output = output + F.log_softmax(self.head(x), dim=1).gather(1, column.unsqueeze(1)).squeeze(1)
    return AdaptiveOutput(output if batched else output.squeeze(0), (-output).mean())


def likeliest(self: Any, input: Tensor) -> Tensor:
    head = self.head(input)
    found = torch.argmax(head, dim=1)
    return torch.where(found < self.shortlist_size, found, torch.argmax(self._get_full_log_prob(input, head), dim=1))
