"""Raise: composites become one operator of meshc's own, random calls get their numbers; what has no such form is refused by its line."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn import functional as F

from meshc.errors import CompileError
from tests.passes.stepped import around, changed


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True) + F.dropout(x, 0.0)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.poisson(x)


def raised(model: nn.Module) -> str:
    with torch.no_grad():
        return changed(*around("raise", model, "dp=2", x=torch.zeros(4, 2, 8, 3)))


def test_composites_and_the_numbers_of_draws() -> None:
    """The second draw is the call after the first; what draws with probability 0 draws nothing and has no number."""
    assert_expected_inline(raised(Draws()), """\
- x: "f32[4, 2, 8, 3]" = torch.nn.functional.dropout(l_flat_args_0_, 0.1)
- scaled_dot_product_attention: "f32[4, 2, 8, 3]" = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True)
+ meshc_seed_step: "i64[2]" = self.meshc_seed_step
+ x: "f32[4, 2, 8, 3]" = meshc.ops.dropout._raised_dropout(l_flat_args_0_, 0.1, seed_step=meshc_seed_step, call=0)
+ scaled_dot_product_attention: "f32[4, 2, 8, 3]" = meshc.ops.sdpa.sdpa(x, x, x, dropout_p=0.2, is_causal=True, seed_step=meshc_seed_step, call=1)
""")


def test_other_calls_are_left_alone() -> None:
    assert raised(Plain()) == ""


def test_a_draw_without_a_form_of_its_own_names_its_line() -> None:
    with pytest.raises(CompileError, match="poisson") as caught:
        raised(Counts())
    assert "test_raise_ops.py" in str(caught.value)
