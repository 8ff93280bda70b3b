"""torch's `flex_attention` with gradients on CPU tensors, for traces and for the reference.

torch refuses to differentiate it on a CPU for lack of a fused kernel, although its written-out form there has a gradient like any other
operator's. These contexts lift that refusal; all other checks of shapes and masks remain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshc.ir import trees
from meshc.private import resolve_name

MODULE = "torch.nn.attention.flex_attention"
STOCK = "transformers.masking_utils"


def masks_as_inputs() -> None:
    """Register torch's BlockMask as a tree: from here on a block mask among a model's inputs is its tensors, in torch's own order."""
    loaded = sys.modules.get(MODULE)
    if loaded is not None and not trees.is_known(loaded.BlockMask):
        kind = loaded.BlockMask
        trees.learn(kind, kind._flatten, kind._unflatten, kind._flatten_with_keys)


@contextmanager
def traced_flex() -> Iterator[None]:
    """A context in which a trace keeps `flex_attention` as one call. Does nothing in a process that has not imported it."""
    stock = {"create_block_mask": _plain_block_mask, "fast_all": _not_all_true}
    with _replace_names(MODULE, _validate_device=_any_device, _apply_kernel_options=_no_options), _replace_names(STOCK, **stock):
        yield


@contextmanager
def written_out_flex() -> Iterator[None]:
    """A context in which `flex_attention` runs torch's written-out form as plain operators: torch compiles the call otherwise, which does
    not work under dispatch modes, such as those that answer random calls."""
    with _replace_names(
        MODULE,
        _validate_device=_any_device,
        _apply_kernel_options=_no_options,
        _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,
        flex_attention_hop=_written_out_attention,
    ):
        yield


@contextmanager
def _replace_names(module: str, **names: object) -> Iterator[None]:
    """A context in which attributes of a module, if imported, have these values."""
    loaded = sys.modules.get(module)
    before = {name: resolve_name(f"{module}:{name}") for name in names} if loaded is not None else {}
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
    """`create_block_mask` without compilation: stock models compile it, which a trace does not enter."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(*call, **named)


def _not_all_true(mask: Tensor) -> bool:
    """The answer to whether a padding mask is all true, which would drop the mask: no, since a trace serves all masks."""
    return False


def _no_options(*call: object, **named: object) -> dict[str, object]:
    """Drops kernel options: they choose kernels, and torch refuses to return the greatest scores on a CPU, which its written-out form
    has."""
    return {"BACKEND": "AUTO"}


def _written_out_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As torch's operator: autocast casts queries, keys and values and nothing inside, and the greatest scores have no gradient."""
    from meshc.private import math_attention

    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        q, k, v = (x if x.dtype == torch.float64 else x.to(low) for x in (q, k, v))
    with torch.autocast(kind, enabled=False):
        out, logarithm, greatest = math_attention(q, k, v, *rest)
    return out, logarithm, greatest.detach()
