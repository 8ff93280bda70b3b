"""torch's `flex_attention` on CPU tensors that take gradients: while a model is traced, and while it is the reference.

torch refuses to differentiate it on a CPU for lack of a fused kernel, though what it runs there, scores written out, has a gradient like
any other. Inside these contexts it does not; all else that torch checks of shapes and masks it still checks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshc.ir import trees
from meshc.private import found

MODULE = "torch.nn.attention.flex_attention"
STOCK = "transformers.masking_utils"


def masks_as_inputs() -> None:
    """From here on a block mask among a model's inputs is the tensors that it holds, as torch lays it out for a trace."""
    loaded = sys.modules.get(MODULE)
    if loaded is not None and not trees.is_known(loaded.BlockMask):
        kind = loaded.BlockMask
        trees.learn(kind, kind._flatten, kind._unflatten, kind._flatten_with_keys)


@contextmanager
def traced_flex() -> Iterator[None]:
    """Inside, a trace takes `flex_attention` as one call. A process that never imported it is left alone."""
    stock = {"create_block_mask": _plain_block_mask, "fast_all": _perhaps_not}
    with _replaced(MODULE, _validate_device=_any_device, _apply_kernel_options=_no_options), _replaced(STOCK, **stock):
        yield


@contextmanager
def written_out_flex() -> Iterator[None]:
    """Inside, `flex_attention` runs torch's own written-out form as plain operators: torch compiles the call for that, which does not go
    together with dispatch modes, such as those that answer random calls."""
    with _replaced(
        MODULE,
        _validate_device=_any_device,
        _apply_kernel_options=_no_options,
        _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,
        flex_attention_hop=_written_out,
    ):
        yield


@contextmanager
def _replaced(module: str, **names: object) -> Iterator[None]:
    """Inside, these names of a module that is loaded are others."""
    loaded = sys.modules.get(module)
    before = {name: found(f"{module}:{name}") for name in names} if loaded is not None else {}
    for name in before:
        setattr(loaded, name, names[name])
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(loaded, name, own)


def _any_device(query: object, key: object, value: object) -> None:
    pass


def _plain_block_mask(*call: Any, _compile: bool = False, **named: Any) -> object:
    """Stock models compile the making of a mask, which a trace does not go into."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(*call, **named)


def _perhaps_not(mask: Tensor) -> bool:
    """Whether a padding mask is all true, asked so as to leave it out: a trace is for all of them."""
    return False


def _no_options(*call: object, **named: object) -> dict[str, object]:
    """They choose kernels; and torch refuses the greatest scores on a CPU there, which its written-out form gives."""
    return {"BACKEND": "AUTO"}


def _written_out(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As around torch's operator: autocast casts queries, keys and values and nothing inside, and the greatest scores have no gradient."""
    from meshc.private import math_attention

    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        q, k, v = (x if x.dtype == torch.float64 else x.to(low) for x in (q, k, v))
    with torch.autocast(kind, enabled=False):
        out, logarithm, greatest = math_attention(q, k, v, *rest)
    return out, logarithm, greatest.detach()
