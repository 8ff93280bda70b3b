"""Contexts that make torch's `flex_attention` differentiable on CPU tensors, in traces and in the reference; block masks as pytree inputs.

torch refuses to differentiate it on a CPU for lack of a fused kernel, although its written-out form there has a gradient like any other
operator's. These contexts lift that refusal; all other checks of shapes and masks remain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from meshc.ir import trees
from meshc.replacements import replace_targets

MODULE = "torch.nn.attention.flex_attention"


def masks_as_inputs() -> None:
    """Register torch's BlockMask as a tree: from here on a block mask among a model's inputs is its tensors, in torch's own order."""
    loaded = sys.modules.get(MODULE)
    if loaded is not None and not trees.is_known(loaded.BlockMask):
        kind = loaded.BlockMask
        trees.learn(kind, kind._flatten, kind._unflatten, kind._flatten_with_keys)


@contextmanager
def written_out_flex() -> Iterator[None]:
    """A context in which `flex_attention` runs torch's written-out form as plain operators: torch compiles the call otherwise, which does
    not work under dispatch modes, such as those that answer random calls."""
    if MODULE not in sys.modules:
        yield
        return
    with traced_flex(), replace_targets(flex_compilation=True, flex_operator=_written_out_attention):
        yield


def traced_flex() -> AbstractContextManager[None]:
    """A context in which a trace keeps `flex_attention` as one call. Does nothing in a process that has not imported it."""
    if MODULE not in sys.modules:
        return nullcontext()
    return replace_targets(flex_device_check=_any_device, flex_kernel_options=_no_options)


def _any_device(query: object, key: object, value: object) -> None:
    pass


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
