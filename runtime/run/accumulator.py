"""In-place accumulation of the parts of microbatches into the value of the whole step."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch

from meshc.program.accumulate import ACCUMULATES, whole_of


class Accumulator:
    """Combines the parts under one key in place. The first part becomes the whole; it is cloned if it is `shared` with another value or
    is a view of a larger storage.

    done  called with the key of the whole, after the part was added
    """

    __slots__ = ("_combine", "_shared", "_whole")

    def __init__(self, key: str, shared: bool) -> None:
        found = whole_of(key)
        assert found is not None
        self._combine, self._whole, self._shared = ACCUMULATES[found[0]], found[1], shared

    def __call__(self, env: MutableMapping[str, torch.Tensor], part: torch.Tensor, done: Callable[[str], None] | None = None) -> None:
        whole = env.get(self._whole)
        if whole is not None:
            self._combine(whole, part, out=whole)
        elif self._shared or (part._base is not None and part._base.numel() != part.numel()):
            env[self._whole] = part.clone()
        else:
            env[self._whole] = part
        if done is not None:
            done(self._whole)
