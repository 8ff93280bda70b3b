"""`torch.nn.attention.flex_attention` in operators that meshc knows: attention with a mask, or scores written out and modified.

    q  [batch, heads, q, head]     k  [batch|1, kv_heads, k, head]     v  [batch|1, kv_heads, k, value]     heads a multiple of kv_heads
    score_mod(score, b, h, i, j, *captured) and mask_mod(b, h, i, j, *captured) take one score and its position; None changes nothing

The blocks of a mask are ignored: their structure repeats the mask for kernels that skip masked blocks. `fold_masks` finds causal masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshc.errors import CompileError
from meshc.ops.sdpa import safe_softmax, sdpa

Mod = Callable[..., Tensor]


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    causal: bool,
    scale: float,
    captured_by_score: Sequence[Tensor],
    captured_by_mask: Sequence[Tensor],
    statistics: bool,
    where: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out [batch, heads, q, value], log-sum-exp and greatest score of each query [batch, heads, q] in powers of two, with `statistics`).

    With `causal` the mask is known to be `i >= j`. `where` is the user's line, for errors. A query without a visible key gets zeros,
    and minus infinity.
    Raises CompileError for functions that cannot be mapped over scores.
    """
    k, v = (_for_each_query_head(x, q) for x in (k, v))
    whole = score_mod is None and not statistics
    seen = (
        None if mask_mod is None or whole and causal else _map_over_scores("mask_mod", where, mask_mod, _positions(q, k), captured_by_mask)
    )
    if whole:
        return sdpa(q, k, v, seen, is_causal=causal, scale=scale), None, None
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q.to(working), k.to(working).transpose(-2, -1)) * scale
    if score_mod is not None:
        scores = _map_over_scores("score_mod", where, score_mod, _positions(q, k), captured_by_score, scores).to(working)
    if seen is not None:
        scores = torch.where(seen, scores, torch.full((), -math.inf, dtype=working, device=q.device))
    out = torch.matmul(safe_softmax(scores).to(q.dtype), v.to(q.dtype))
    if not statistics:
        return out, None, None
    return out, _log_sum_exp(scores) / math.log(2.0), scores.detach().amax(-1) / math.log(2.0)


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [batch|1, kv_heads, k, head] -> [batch, heads, k, head], a head repeated for the queries that share it."""
    if x.shape[1] != q.shape[1]:
        x = x.unsqueeze(2).expand(-1, -1, q.shape[1] // x.shape[1], -1, -1).flatten(1, 2)
    return x if x.shape[0] == q.shape[0] else x.expand(q.shape[0], -1, -1, -1)


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.arange(size, device=q.device) for size in (*q.shape[:3], k.shape[2]))


def _map_over_scores(name: str, where: str, mod: Mod, positions: tuple[Tensor, ...], captured: Sequence[Tensor], *scores: Tensor) -> Tensor:
    """`mod`, a function of one score and its position, mapped over all scores: [batch, heads, q, k]."""
    given = (0,) * len(scores)
    rest = (None,) * len(captured)
    for dim in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=(*given, *(0 if dim == other else None for other in range(4)), *rest))
    try:
        return mod(*scores, *positions, *captured)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CompileError(
            f"the {name} of flex_attention() at {where} cannot be mapped over all scores: {str(error).splitlines()[0]}\n"
            "  what to do: write it as arithmetic, torch.where and indexing (table[h, i - j]) on single numbers"
        ) from error


def _log_sum_exp(scores: Tensor) -> Tensor:
    """Log-sum-exp of the scores of each query; minus infinity, without a gradient, for a query without a visible key."""
    blind = scores.detach().amax(-1) == -math.inf
    zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
    found = torch.logsumexp(torch.where(blind.unsqueeze(-1), zero, scores), -1)
    return torch.where(blind, torch.full((), -math.inf, dtype=scores.dtype, device=scores.device), found)
