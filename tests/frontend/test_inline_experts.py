"""Loops over experts that write the expert out, by rows of stacked parameters: what is read of them, and that training of them equals."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.frontend.listed_experts import formed_experts, listed_experts, loop_of, looped_expert_counts, unchosen_parameters
from meshc.program.program import PlainProgram
from meshc.report import summary
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401

EXPERTS, WIDTH, HIDDEN = 6, 8, 12


class Eager(nn.Module):
    """As transformers' own code has it, whose decorator people leave out when they copy it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.act_fn, self.limit = nn.SiLU(), 1.5

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        final_hidden_states = torch.zeros_like(hidden_states)
        with torch.no_grad():
            expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts + 1)
            expert_mask = expert_mask.permute(2, 1, 0)
            expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]
            if expert_idx == self.num_experts:
                continue
            top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[token_idx]
            gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current_hidden_states = self._clamped(self.act_fn(gate)) * up
            current_hidden_states = F.linear(current_hidden_states, self.down_proj[expert_idx])
            current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
            final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))
        return final_hidden_states

    def _clamped(self, x: Tensor) -> Tensor:
        return x.clamp(max=self.limit)


class Matmul(nn.Module):
    """Untransposed weights, a loop over all numbers, what is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.w1.shape[0]):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            w = self.w1[e]
            h = x[token] @ w
            half = h[:, ::2]
            h += x[token] @ self.w1[e] * 0.5
            h = torch.tanh(torch.cat([half, h[:, 1::2]], -1))
            h = h @ self.w2[e].T
            h *= weights[token, slot].unsqueeze(-1)
            out[token] += h
        return out


KINDS: dict[str, type[nn.Module]] = {"Eager": Eager, "Matmul": Matmul}


class Mixed(Matmul):
    """Rows that know of each other."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(chosen == e)
            h = x[token] @ self.w1[e]
            h = h - h.mean(0)
            out[token] += (h @ self.w2[e].T) * weights[token, slot, None]
        return out


class Model(nn.Module):
    def __init__(self, kind: str, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([{**KINDS, "Mixed": Mixed}[kind]() for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x.flatten(0, 1))
        for experts in self.experts:
            weights, chosen = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
            x = x + experts(x, chosen, weights)
        return x


def trained(kind: str, mesh: str, microbatches: int | None = None, rows: int = 8, **options: object) -> meshc.Program:
    model = Model(kind).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=lambda y: y.square().mean(), clip_grad_norm=1.0, microbatches=microbatches)
    x = torch.randn(rows, 5, WIDTH, dtype=torch.float64)
    return meshc.compile(step, meshc.Mesh(mesh), options=meshc.Options(**options), args=(x,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_is_one_product_that_means_the_same(kind: str) -> None:
    torch.manual_seed(0)
    layer = KINDS[kind]().double()
    x = torch.randn(7, WIDTH, dtype=torch.float64, requires_grad=True)
    weights, chosen = torch.rand(7, EXPERTS, dtype=torch.float64).topk(2, dim=-1)
    inputs = [x, *layer.parameters()]
    wanted = layer(x, chosen, weights)
    theirs = torch.autograd.grad(wanted.square().sum(), inputs)
    loop = loop_of(layer)
    assert loop is not None and loop.inline is not None and loop.count(layer) == EXPERTS
    assert looped_expert_counts(layer) == {} and unchosen_parameters(layer) == {}  # a stack has a gradient whatever is chosen
    for groups in (1, 2, 4):
        with formed_experts(layer, lambda path, groups=groups: groups), listed_experts(layer):
            mine = layer(x, chosen, weights)
            grads = torch.autograd.grad(mine.square().sum(), inputs)
        torch.testing.assert_close(mine, wanted)
        torch.testing.assert_close(grads, theirs)


def test_choices_that_are_passed_over_count_nothing() -> None:
    torch.manual_seed(0)
    layer = Eager()
    given = torch.randn(3, WIDTH), torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS], [5, 2]]), torch.rand(3, 2)
    wanted = layer(*given)
    with formed_experts(layer, lambda path: 2), listed_experts(layer):
        torch.testing.assert_close(layer(*given), wanted)


def test_experts_lie_by_expert_and_their_gradients_are_not_added_up_over_it() -> None:
    found = trained("Eager", "ep=2")
    assert isinstance(found.compiled, PlainProgram)
    sharding = found.compiled.port("parameter:experts.0.down_proj").sharding
    assert sharding is not None and [part.axes for part in sharding.dims[0]] == [("ep",)]
    assert not any(use.axes == ("ep",) and "group_outer" in use.reason for use in summary.collectives(found.compiled))
    verified = meshc.verify(found, dtype=torch.float64)
    assert verified.ok, verified


def test_fewer_rows_than_ranks_and_microbatches_want_are_said_so() -> None:
    said = "microbatches=2: the batch has 4 rows, and each of 4 ranks along ep takes a row of every microbatch"
    with pytest.raises(meshc.CompileError, match=said) as raised:
        trained("Eager", "ep=4", microbatches=2, rows=4)
    assert "what to do: microbatches=1, or 8 rows" in str(raised.value)


class Whole(Matmul):
    """Reads all experts' weights beside its own."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(chosen == e)
            h = x[token] @ (self.w1[e] + self.w1.mean(0)) @ self.w2[e].T
            out[token] += h * weights[token, slot, None]
        return out


class Other(Matmul):
    """What an expert makes of a token hangs on its weight."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(chosen == e)
            h = torch.relu(x[token] @ self.w1[e] - weights[token, slot, None]) @ self.w2[e].T
            out[token] += h * weights[token, slot, None]
        return out


class Fewer(Matmul):
    """Goes over some of its experts."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(3):
            token, slot = torch.where(chosen == e)
            out[token] += (x[token] @ self.w1[e] @ self.w2[e].T) * weights[token, slot, None]
        return out


@pytest.mark.parametrize("kind", [Whole, Other, Fewer])
def test_what_is_not_known_is_left_to_torch(kind: type[nn.Module]) -> None:
    assert loop_of(kind()) is None


def test_rows_that_know_of_each_other_are_refused_with_the_line() -> None:
    said = r"the loop over experts of experts.0 cannot be traced as one product\n  in your model: .*test_inline_experts.py:\d+"
    KINDS["Mixed"] = Mixed
    with pytest.raises(meshc.CaptureError, match=said) as raised:
        trained("Mixed", "ep=2")
    assert re.search("aten.mean.dim is not known to keep its rows apart", str(raised.value))


def test_longcats_experts_that_have_no_weights_give_back_what_they_are_given() -> None:
    from transformers import LongcatFlashConfig
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

    torch.manual_seed(0)
    config = LongcatFlashConfig(hidden_size=WIDTH, n_routed_experts=5, zero_expert_num=3, expert_ffn_hidden_size=HIDDEN)
    layer = LongcatFlashExperts(config).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(7, WIDTH, dtype=torch.float64, requires_grad=True)
    weights, chosen = torch.rand(7, 8, dtype=torch.float64, requires_grad=True).topk(3, dim=-1)
    inputs = [x, weights, *layer.parameters()]
    wanted = layer(x, chosen, weights)
    theirs = torch.autograd.grad(wanted.square().sum(), inputs)
    for groups in (1, 2):
        with formed_experts(layer, lambda path, groups=groups: groups), listed_experts(layer):
            mine = layer(x, chosen, weights)
            grads = torch.autograd.grad(mine.square().sum(), inputs)
        torch.testing.assert_close(mine, wanted)
        torch.testing.assert_close(grads, theirs)


def llama4() -> nn.Module:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "intermediate_size_mlp": HIDDEN, "num_local_experts": 4}
    layer = Llama4TextMoe(Llama4TextConfig(**sizes, num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=2, head_dim=4)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


@pytest.mark.parametrize("groups", [1, 2])
def test_llama4s_experts_are_given_the_tokens_that_have_chosen_them(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = llama4()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    wanted = layer(x)
    theirs = torch.autograd.grad(sum(each.square().sum() for each in wanted), inputs)
    monkeypatch.setattr(type(layer.experts), "forward", None)  # nobody calls it
    with formed_experts(layer, lambda path: groups), listed_experts(layer):
        mine = layer(x)
        grads = torch.autograd.grad(sum(each.square().sum() for each in mine), inputs)
    torch.testing.assert_close(mine, wanted)
    torch.testing.assert_close(grads, theirs)


class Soft(nn.Module):
    """Scores of all experts."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)[1]
        return logits.sigmoid(), logits


def test_llama4s_layer_with_another_router_is_as_its_code_has_it() -> None:
    layer, x = llama4(), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    layer.router = Soft(layer.router)
    wanted = layer(x)[0]
    with formed_experts(layer, lambda path: 1), listed_experts(layer):
        torch.testing.assert_close(layer(x)[0], wanted)
