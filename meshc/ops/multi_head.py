"""`torch.nn.functional.multi_head_attention_forward` in operators that meshc knows: projections, `sdpa`, projection.

    query  [target, batch, width]     key, value  [source, batch, ...]     result  [target, batch, width], weights [batch, target, source]

torch's own code is not traced: it would take the backend's attention, and draw its dropout from torch's generator.
"""

from __future__ import annotations

import math
from typing import TypeAlias, cast

import torch
from torch import Tensor

from meshc.errors import CompileError
from meshc.ops.random import dropout, dropout_without_draws
from meshc.ops.sdpa import sdpa

functional = torch.nn.functional
_Weights: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor]


def _as_batch_of_one(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), None if padding is None else padding.unsqueeze(0)


def _by_heads(projected: list[Tensor], heads: int) -> list[Tensor]:
    """Each of `projected`, [length, batch, width] -> [batch, heads, length, width of a head]."""
    return [x.reshape(x.shape[0], x.shape[1], heads, -1).permute(1, 2, 0, 3) for x in projected]


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, seed_step: Tensor | None, call: int
) -> tuple[Tensor, Tensor]:
    """(weights, output) of attention whose weights are requested, decomposed."""
    shares = torch.softmax(_scores(q, k, bias), -1)
    shares = dropout(shares, seed_step, call, p) if seed_step is not None and 0.0 < p < 1.0 else dropout_without_draws(shares, p, True)
    return shares, torch.matmul(shares, v)


def _refuse_rows_more(add_zero_attn: bool, *given: Tensor | None) -> None:
    if add_zero_attn or any(tensor is not None for tensor in given):
        raise CompileError(
            "multi-head attention with bias_k, bias_v, add_zero_attn, static_k or static_v is not known to meshc.\n"
            "  what to do: leave these out (nn.MultiheadAttention(add_bias_kv=False, add_zero_attn=False)), or write the attention out"
        )


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    seed_step: Tensor | None = None,
    call: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """As torch's. Raises CompileError for static keys and values, and for those with a further row (bias_k, add_zero_attn)."""
    _refuse_rows_more(add_zero_attn, bias_k, bias_v, static_k, static_v)
    batched = query.dim() == 3
    if not batched:
        query, key, value, key_padding_mask = _as_batch_of_one(query, key, value, key_padding_mask)
    target, batch, width = query.shape
    weights = cast(_Weights, (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight)
    q, k, v = _by_heads(_project_inputs(query, key, value, weights, in_proj_bias), num_heads)
    causal = is_causal and key_padding_mask is None and not need_weights
    bias = None if causal else _merge_masks(attn_mask, key_padding_mask, q, k)
    p = dropout_p if training else 0.0
    shares = None
    if need_weights:
        shares, mixed = _written_out(q, k, v, bias, p, seed_step, call)
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        mixed = sdpa(q, k, v, bias, p, causal, seed_step=seed_step, call=call)
    out = functional.linear(mixed.permute(2, 0, 1, 3).reshape(target, batch, width), out_proj_weight, out_proj_bias)
    if not batched:
        return out.squeeze(1), None if shares is None else shares.squeeze(0)
    return out, shares


def _project_inputs(query: Tensor, key: Tensor, value: Tensor, weights: _Weights, bias: Tensor | None) -> list[Tensor]:
    """Query, key and value after their projections; one product where they are one tensor and have one weight."""
    if isinstance(weights, Tensor) and query is key and key is value:
        return list(functional.linear(query, weights, bias).chunk(3, -1))
    three = weights.chunk(3) if isinstance(weights, Tensor) else weights
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    return [functional.linear(x, w, b) for x, w, b in zip((query, key, value), three, biases, strict=True)]


def _merge_masks(mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Bias of the scores [batch, heads, target, source]: the mask plus the padding of the keys, each boolean or additive."""
    batch, heads, target, source = *q.shape[:3], k.shape[2]
    found: Tensor | None = None
    if mask is not None:
        added = _additive_mask(mask, q.dtype)
        found = added.reshape(1, 1, target, source) if mask.dim() == 2 else added.reshape(batch, heads, target, source)
    if padding is not None:
        row = _additive_mask(padding, q.dtype).reshape(batch, 1, 1, source)
        found = row if found is None else found + row
    return found


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, torch.full((), -math.inf, dtype=dtype, device=mask.device), zero)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = torch.matmul(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1))
    return scores if bias is None else scores + bias
