"""Mixtral with its experts split over ranks, by hand with torch.distributed, as a careful user would write it.

    a row of each token and choice, by expert -> all-to-all of counts, then of rows -> experts of this rank -> all-to-all back

Everything but the experts is DistributedDataParallel's; each rank has its own rows of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Exchange(torch.autograd.Function):
    """[rows, hidden] -> [rows that others send, hidden]"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.taken, ctx.group = sent, taken, group
        return _exchange(rows, sent, taken, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _exchange(grad.contiguous(), ctx.taken, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(taken), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, taken, sent, group=group)
    return out


class SplitExperts(nn.Module):
    """Takes the place of Mixtral's experts: those of this rank."""

    def __init__(self, whole: Any, group: ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks, self.count = group, group.size(), whole.num_experts
        own = slice(group.rank() * self.count // self.ranks, (group.rank() + 1) * self.count // self.ranks)
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj.detach()[own].clone())
        self.down_proj = nn.Parameter(whole.down_proj.detach()[own].clone())
        self.act_fn = whole.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        choices, order = top_k_index.flatten().sort(stable=True)
        token = order // top_k_index.shape[1]
        counts = torch.bincount(choices, minlength=self.count)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, taken = (each.view(self.ranks, -1).sum(1).tolist() for each in (counts, theirs))
        rows = Exchange.apply(hidden_states[token], sent, taken, self.group)
        # Rows lie by the rank that sent them, then by expert; an expert wants those of all ranks.
        of = torch.arange(self.count // self.ranks).repeat(self.ranks).repeat_interleave(theirs)
        by_expert = of.argsort(stable=True)
        parts = rows[by_expert].split(theirs.view(self.ranks, -1).sum(0).tolist())
        made = torch.cat([self._expert(index, part) for index, part in enumerate(parts)])
        back = torch.empty_like(made).index_copy(0, by_expert, made)
        given = Exchange.apply(back, taken, sent, self.group) * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, token, given)

    def _expert(self, index: int, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up_proj[index]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[index])


def split(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """The model with this rank's experts, whose gradients are means over ranks as those of everything else."""
    own = []

    def _mean(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(group.size())

    for name, module in list(model.named_modules()):
        if name.endswith(".mlp.experts"):
            experts = SplitExperts(module, group)
            model.set_submodule(name, experts)
            own += [f"{name}.{key}" for key, _ in experts.named_parameters()]
    for name in own:
        model.get_parameter(name).register_post_accumulate_grad_hook(_mean)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
