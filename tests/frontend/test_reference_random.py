"""The reference: the model as it is, whose random calls are answered with meshc's draws."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshc.errors import MeshcError
from meshc.frontend.reference_random import ReferenceRandom
from meshc.ops import random
from meshc.ops.random_calls import RAISED


def test_eager_dropout_is_meshc_dropout() -> None:
    x = torch.randn(8, 33, requires_grad=True)
    with ReferenceRandom(7, 2) as reference:
        first, second = F.dropout(x, 0.1), F.dropout(x, 0.6)
        F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, training=False)
        with torch.inference_mode():
            third = F.dropout(x, 0.1)
            F.dropout(x, 1.0)
    assert reference.calls == 3
    seed = random.seed_step(7, 2)
    torch.testing.assert_close(first, random.dropout(x, seed, 0, 0.1))
    torch.testing.assert_close(second, random.dropout(x, seed, 1, 0.6))
    torch.testing.assert_close(third, random.dropout(x, seed, 2, 0.1))
    (gradient,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(gradient, random.keep_mask(seed, 0, 0.1, x.shape) / 0.9)


def test_eager_dropout_of_a_transposed_tensor_counts_rows_of_the_view() -> None:
    x = torch.randn(9, 4).t()
    with ReferenceRandom(7):
        torch.testing.assert_close(F.dropout(x, 0.5), random.dropout(x, random.seed_step(7), 0, 0.5))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_dropout(causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with ReferenceRandom(1) as reference:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=causal)
        F.scaled_dot_product_attention(q, k, v)
    assert reference.drawn == [("aten.bernoulli_.float", (2, 3, 5, 5))]
    scores = q @ k.transpose(-2, -1) / math.sqrt(8)
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = random.dropout(scores.softmax(-1), random.seed_step(1), 0, 0.1) @ v
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_draws() -> None:
    seed, p = random.seed_step(3, 4), torch.rand(6)
    with ReferenceRandom(3, 4):
        assert torch.equal(torch.rand(2, 3), random.uniform(seed, 0, (2, 3)))
        assert torch.equal(torch.randn(5, dtype=torch.float64), random.normal(seed, 1, (5,), torch.float64))
        assert torch.equal(torch.rand_like(p, dtype=torch.bfloat16), random.uniform(seed, 2, (6,), torch.bfloat16))
        assert torch.equal(torch.randn_like(p), random.normal(seed, 3, (6,)))
        assert torch.equal(torch.empty(4).uniform_(-1, 3), random.uniform(seed, 4, (4,)) * 4.0 - 1.0)
        assert torch.equal(torch.empty(4).normal_(2.0, 0.5), random.normal(seed, 5, (4,)) * 0.5 + 2.0)
        assert torch.equal(torch.bernoulli(p), (random.uniform(seed, 6, (6,)) >= 1 - p).float())
        assert torch.equal(torch.empty(6).bernoulli_(0.25), random.keep_mask(seed, 7, 0.75, (6,)).float())
        assert torch.equal(torch.normal(p, p), random.normal(seed, 8, (6,)) * p + p)
        assert torch.equal(torch.native_dropout(p, 0.5, True)[1], random.keep_mask(seed, 9, 0.5, (6,)))
        torch.rand(2, 3, out=(written := torch.empty(2, 3)))
        assert torch.equal(written, random.uniform(seed, 10, (2, 3)))


def test_what_has_no_definition_is_refused() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with ReferenceRandom(0):
        for undefined in (lambda: torch.poisson(x.abs()), lambda: torch.empty(3).random_()):
            with pytest.raises(MeshcError, match="does not define"):
                undefined()
        with pytest.raises(MeshcError, match="checkpointing"):
            checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=False, preserve_rng_state=False).sum().backward()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.channel, self.alpha = nn.Dropout(0.2), nn.Dropout1d(0.3), nn.AlphaDropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.alpha(self.channel(self.drop(torch.relu(self.first(x)))))
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], dropout_p=0.1)[:, 0]
        return self.second(h + torch.rand_like(h))


def test_a_small_model_and_its_gradients() -> None:
    torch.manual_seed(0)
    model, x, s = Small().double(), torch.randn(3, 4, 6, dtype=torch.float64), random.seed_step(5, 6)
    with ReferenceRandom(5, 6) as reference:
        out = model(x)
    assert [shape for _, shape in reference.drawn] == [(3, 4, 6), (3, 4, 1), (3, 4, 6), (3, 1, 4, 4), (3, 4, 6)]
    h = random.dropout(torch.relu(model.first(x)), s, 0, 0.2)
    h = RAISED[F.dropout1d](h, 0.3, seed_step=s, call=1)
    h = RAISED[F.alpha_dropout](h, 0.4, True, seed_step=s, call=2)
    h = random.dropout((h @ h.mT / math.sqrt(6)).softmax(-1)[:, None], s, 3, 0.1)[:, 0] @ h
    expected = model.second(h + RAISED[torch.rand_like](h, seed_step=s, call=4))
    torch.testing.assert_close(out, expected)
    parameters = list(model.parameters())
    for ours, theirs in zip(torch.autograd.grad(out.sum(), parameters), torch.autograd.grad(expected.sum(), parameters), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gpt2_draws_in_a_fixed_order() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(50, (2, 8))

    def run(step: int) -> tuple[Tensor, list[Tensor], ReferenceRandom]:
        torch.rand(3)  # torch's own generator has no part in it
        model.zero_grad()
        with ReferenceRandom(1, step) as reference:
            loss = model(ids, labels=ids).loss
        loss.backward()
        return loss, [parameter.grad.clone() for parameter in model.parameters()], reference

    loss, gradients, reference = run(0)
    layer = [(2, 4, 8, 8), (2, 8, 32), (2, 8, 32)]  # attention, its projection, the feed-forward
    assert [shape for _, shape in reference.drawn] == [(2, 8, 32), *layer, *layer]
    again, gradients_again, _ = run(0)
    assert torch.equal(loss, again) and all(map(torch.equal, gradients, gradients_again))
    other, _, _ = run(1)
    assert not torch.equal(loss, other)
