"""Causal-mask hint of `nn.Transformer`, which a trace cannot compute from a mask's values.

    nn.Transformer()(src, tgt, tgt_mask=mask)    torch compares the values of the mask with a causal one's, to choose kernels

The answer is a hint beside the mask, and the mask is applied in any case: without the hint the result is the same. meshc itself finds out
whether a mask is causal, from the operators that computed it (`passes/trace/fold_masks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from meshc.replacements import replace_targets


@contextmanager
def unhinted_masks() -> Iterator[None]:
    """A context in which the hint is the caller's `is_causal`, and False where none was given."""
    with replace_targets(causal_hint=_caller_hint):
        yield


def _caller_hint(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True
