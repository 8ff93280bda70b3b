"""Multi-head attention against torch's own, in all its forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshc.errors import CompileError
from meshc.ops.multi_head import multi_head_attention

BATCH, TARGET, SOURCE, WIDTH, HEADS = 2, 5, 3, 8, 2
GENERATOR = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def arguments(layer: nn.MultiheadAttention) -> dict[str, object]:
    return {
        "embed_dim_to_check": WIDTH, "num_heads": HEADS, "in_proj_weight": layer.in_proj_weight, "in_proj_bias": layer.in_proj_bias,
        "bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0, "out_proj_weight": layer.out_proj.weight,
        "out_proj_bias": layer.out_proj.bias,
    }  # fmt: skip


PADDING = torch.tensor([[False, False, True], [False, True, False]])
CROSSING = f(TARGET, SOURCE)
FORMS = {
    "plain": {},
    "weights": {"need_weights": True},
    "weights of each head": {"need_weights": True, "average_attn_weights": False},
    "mask of numbers": {"attn_mask": CROSSING},
    "mask of truths": {"attn_mask": CROSSING > 1.0, "need_weights": True},
    "mask of each head": {"attn_mask": f(BATCH * HEADS, TARGET, SOURCE)},
    "padding": {"key_padding_mask": PADDING},
    "padding and mask": {"key_padding_mask": PADDING, "attn_mask": CROSSING > 2.0, "need_weights": True},
    "causal": {"attn_mask": torch.ones(TARGET, SOURCE).triu(1).bool(), "is_causal": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_it_gives_what_torch_gives(form: str) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)
    nn.init.normal_(layer.in_proj_bias)
    query, key, value = f(TARGET, BATCH, WIDTH).requires_grad_(), f(SOURCE, BATCH, WIDTH), f(SOURCE, BATCH, WIDTH)
    how = {**arguments(layer), "need_weights": False, **FORMS[form]}
    found = multi_head_attention(query, key, value, **how)  # type: ignore[arg-type]
    wanted = F.multi_head_attention_forward(query, key, value, **how)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)
    given = [query, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found[0].square().sum(), given), torch.autograd.grad(wanted[0].square().sum(), given)
    )


def test_one_tensor_for_all_three_and_no_batch() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, bias=False)
    x = f(TARGET, WIDTH)
    how = {**arguments(layer), "need_weights": True}
    torch.testing.assert_close(multi_head_attention(x, x, x, **how), F.multi_head_attention_forward(x, x, x, **how))  # type: ignore[arg-type]


def test_keys_and_values_of_another_width_have_weights_of_their_own() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=4, dtype=torch.float64)
    how = {
        **arguments(layer), "use_separate_proj_weight": True, "q_proj_weight": layer.q_proj_weight,
        "k_proj_weight": layer.k_proj_weight, "v_proj_weight": layer.v_proj_weight,
    }  # fmt: skip
    given = (f(TARGET, BATCH, WIDTH), f(SOURCE, BATCH, 6), f(SOURCE, BATCH, 4))
    torch.testing.assert_close(multi_head_attention(*given, **how), F.multi_head_attention_forward(*given, **how))  # type: ignore[arg-type]


def test_a_row_more_of_keys_is_refused() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True, dtype=torch.float64)
    x = f(TARGET, BATCH, WIDTH)
    with pytest.raises(CompileError, match="add_zero_attn"):
        multi_head_attention(x, x, x, **{**arguments(layer), "add_zero_attn": True})  # type: ignore[arg-type]
