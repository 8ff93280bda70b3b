"""CUDA kernels of attention: dispatch among torch's cuDNN, flash and memory-efficient kernels by operands and hardware.

    16 bits, no bias, as many keys as queries or no mask   cuDNN's or flash, by `torch.nn.attention.sdpa_kernel` and the hardware
    else                                                   the memory-efficient one
    64 bits                                                all scores at once (`attention_in_full.py`), a reference

Heads are padded with zeros to multiples of 16 bytes, the kernels' unit. Backward does not depend on which kernel computed `out` and `lse`:
the values are the same. Results are in memory order queries, then heads.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from meshc.ops.attention_in_full import in_full, in_full_backward, to_kernel_layout

aten: Final = torch.ops.aten
AT_ONCE: Final = 16
"""Bytes that kernels read at once; the size of a head must be a multiple."""


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)`; the last dim of the operands is contiguous."""
    if q.dtype == torch.float64:
        return in_full(q, k, v, bias, causal, scale)
    head = q.shape[3]
    q, k, v = (_pad_heads(x) for x in (q, k, v))
    kernel = _choose_kernel(q, k, v, bias, causal, scale)
    if kernel == SDPBackend.CUDNN_ATTENTION:
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    elif kernel == SDPBackend.FLASH_ATTENTION:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, _expand_bias(bias, q, k), True, 0.0, causal, scale=scale)[:2]
        lse = lse[:, :, : q.shape[2]]
    return to_kernel_layout(out[..., :head]), lse.reshape(q.shape[:3]).contiguous()


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.dtype == torch.float64:
        return in_full_backward(grad, q, k, v, bias, out, lse, causal, scale)
    head, queries, keys = q.shape[3], q.shape[2], k.shape[2]
    grad, q, k, v, out = (_pad_heads(x) for x in (grad, q, k, v, out))
    out = to_kernel_layout(
        out
    )  # in 16 bits cuDNN's and the memory-efficient kernel give wrong gradients for another layout of `out` (torch 2.11)
    kernel = _choose_kernel(q, k, v, bias, causal, scale)
    if kernel == SDPBackend.CUDNN_ATTENTION:
        draw = torch.empty((), dtype=torch.int64, device=q.device)
        found = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.contiguous().unsqueeze(-1), draw, draw, None, None, None, queries, keys, 0.0, causal, scale=scale
        )
    elif kernel == SDPBackend.FLASH_ATTENTION:
        draws = torch.empty(2, dtype=torch.uint64, device=q.device)
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, queries, keys, 0.0, causal, draws, draws[:0], scale=scale
        )
    else:
        padding = -queries % 32
        lse = F.pad(lse, (0, padding), value=math.inf) if padding else lse
        draw = torch.empty((), dtype=torch.int64, device=q.device)
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, _expand_bias(bias, q, k), out, lse, draw, draw, 0.0, [True, True, True, False], causal, scale=scale
        )
    dq, dk, dv = (to_kernel_layout(x[..., :head]) for x in found[:3])
    return dq, dk, dv


def _choose_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> SDPBackend:
    """The kernel that torch would choose. For a causal mask over fewer queries than keys the kernels differ in its meaning."""
    if q.itemsize != 2 or bias is not None or causal and q.shape[2] != k.shape[2]:
        return SDPBackend.EFFICIENT_ATTENTION
    found = SDPBackend(aten._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale))
    return found if found in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) else SDPBackend.EFFICIENT_ATTENTION


def _pad_heads(x: Tensor) -> Tensor:
    """`x` with heads padded by zeros to a multiple of `AT_ONCE` bytes."""
    missing = -x.shape[3] % (AT_ONCE // x.itemsize)
    return F.pad(x, (0, missing)) if missing else x


def _expand_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
