"""Layers of experts as people write them: modules in a list, and a loop over them in forward."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, WIDTH = 6, 8


class Expert(nn.Module):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.num_experts = EXPERTS


class Hit(Layer):
    """Over the experts that are chosen, as stock Mixtral once had it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        weights, selected = torch.topk(F.softmax(self.gate(hidden_states), dim=1), 2, dim=-1)
        final = torch.zeros((batch * length, width), dtype=hidden_states.dtype, device=hidden_states.device)
        expert_mask = torch.nn.functional.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, width)
            current = expert_layer(current_state) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch, length, width)


class All(Layer):
    """Over all experts: those with no token get a gradient of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        weights, selected = torch.topk(self.gate(rows), 2)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(selected == i)
            out[token] += weights[token, nth, None] * expert(rows[token])
        return out.view(x.shape)


class Masked(Layer):
    """By a mask of tokens, and gates that are zero where an expert is not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        top, indices = logits.topk(2, dim=-1)
        gates = torch.full_like(logits, float("-inf")).scatter(-1, indices, top).softmax(-1)
        out = torch.zeros_like(x)
        flat, flat_gates = x.view(-1, x.size(-1)), gates.view(-1, gates.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (indices == i).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                made = expert(flat[flat_mask])
                score = flat_gates[flat_mask, i].unsqueeze(1)
                out[mask] += made * score
        return out


class One(Layer):
    """One expert for a token."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weight, selected = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for e in range(self.num_experts):
            (token,) = torch.where(selected == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.experts[e](rows[token]) * weight[token].unsqueeze(-1))
        return out.view(x.shape)


class Places(Layer):
    """Of tokens that lie in rows of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        weights, selected = torch.topk(self.gate(x), 2)
        out = torch.zeros_like(x)
        for i in range(len(self.experts)):
            row, place, nth = torch.where(selected == i)
            if row.shape[0] == 0:
                continue
            out[row, place] += self.experts[i](x[row, place]) * weights[row, place, nth][:, None]
        return out


class Gated(Layer):
    """All experts for all tokens, by gates that are zero where one is not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        top, chosen = logits.topk(2, dim=-1)
        gates = torch.full_like(logits, float("-inf")).scatter(-1, chosen, top).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + gates[..., i : i + 1] * expert(x)
        return out


class Soft(Layer):
    """A mixture of all experts, each of which counts for something."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        gates = self.gate(rows).softmax(-1)
        out = torch.zeros_like(rows)
        for i in range(self.num_experts):
            out += self.experts[i](rows) * gates[:, i].unsqueeze(1)
        return out.view(x.shape)


class Where(Layer):
    """All experts for all tokens, of which `torch.where` takes what was chosen."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        _, chosen = gates.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(-1, keepdim=True)
            out = out + torch.where(mask, expert(x), 0.0) * gates[..., i, None]
        return out


class Scores(Layer):
    """All experts for all tokens, by what their choices of it count for, added up."""

    def forward(self, x: Tensor) -> Tensor:
        weights, selected = torch.topk(self.gate(x).softmax(-1), 2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = selected == i
            score = (weights * mask).sum(-1)
            out += score[..., None] * expert(x)
        return out


class Router(nn.Module):
    """Choices and weights, made in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(x).sigmoid()
        chosen = torch.topk(scores, 2, dim=-1)[1]
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


class Counted(Layer):
    """As DeepSeek V3's own code has it: the choices come from another module, and a count says who is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.gate.bias = self.gate.score.bias

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, shape[-1])
        weights, indices = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=self.num_experts).tolist()
        for i in range(0, self.num_experts):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        return y.view(shape)


class Repeated(Layer):
    """As DeepSeekMoE's code for training has it: a row for each choice, written by its expert."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        weights, chosen = torch.topk(self.gate(rows).softmax(-1), 2, dim=-1)
        flat = chosen.view(-1)
        rows = rows.repeat_interleave(2, dim=0)
        y = torch.empty_like(rows)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(rows[flat == i])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).view(x.shape)


class Written(Layer):
    """One expert for a token, whose row is written where it is."""

    def forward(self, x: Tensor) -> Tensor:
        count = len(self.experts)
        rows = x.reshape(-1, x.shape[-1])
        weight, selected = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for n in range(count):
            at = (selected == n).nonzero().squeeze(-1)
            if len(at) == 0:
                continue
            out[at] = self.experts[n](rows[at]) * weight[at].unsqueeze(-1)
        return out.view(x.shape)


LOOPS: Final[dict[str, type[Layer]]] = {
    each.__name__: each for each in (Hit, All, Masked, One, Places, Counted, Repeated, Written, Gated, Soft, Where, Scores)
}
OF_ALL: Final = ("Gated", "Soft", "Where", "Scores")
"""Loops that torch traces as they are."""


class Model(nn.Module):
    """Layers of experts with a residual; `lean` keeps tokens from the last two experts."""

    def __init__(self, kind: str, layers: int = 2, lean: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList([LOOPS[kind]() for _ in range(layers)])
        with torch.no_grad():
            for layer in self.layers:
                layer.gate.bias[-2:] -= lean  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.down(x)
