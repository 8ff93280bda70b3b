"""What `nn.Transformer` asks of a mask, which a trace cannot answer: whether it is the causal one.

    nn.Transformer()(src, tgt, tgt_mask=mask)    torch compares the values of the mask with a causal one's, to tell kernels of it

The answer is a hint beside the mask, and the mask is applied all the same: without the hint the result is the same. Whether a mask is
causal meshc finds out by itself, from how it was made (`passes/trace/fold_masks.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

MODULE = "torch.nn.modules.transformer"


@contextmanager
def unhinted_masks() -> Iterator[None]:
    """Inside, the hint is what the caller has said, and nothing where nothing was said."""
    with mock.patch.object(sys.modules[MODULE], "_detect_is_causal_mask", _said):
        yield


def _said(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True
