"""Canonical forms of call arguments: one `Form` for all calls of equal structure, shapes, dtypes and plain values.

    forms = Forms()
    forms.of(((), {"ids": x, "cache": [[k, v]]}))    leaves [x, k, v] and a Form; the same Form for others of these shapes and dtypes

Facts about one call (whether a program accepts it, what it is compiled as) hold for all calls of its form, and are memoised by it. Only
trees of Python's own dicts, lists and tuples, with tensors and plain values as leaves, have a form: other objects may have hidden state.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import torch

PLAIN: Final = frozenset({type(None), bool, int, float, str})
MOST: Final = 1024
"""So many forms are remembered; after that it begins anew."""


class Form:
    """Equal to itself alone. `keys`: under what calls of it are kept, by what else decides that."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: dict[Hashable, Any] = {}


class _Other(Exception):
    """Something in a tree that has no form."""


class Forms:
    """Those that have been seen."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Form] = {}

    def of(self, tree: object) -> tuple[list[object], Form | None]:
        """The leaves of a tree in their order, and its form; neither where something in it has none."""
        leaves: list[object] = []
        try:
            described = _describe(tree, leaves)
        except _Other:
            return [], None
        found = self._seen.get(described)
        if found is None:
            if len(self._seen) >= MOST:
                self._seen.clear()
            found = self._seen[described] = Form()
        return leaves, found


def _describe(tree: Any, leaves: list[object]) -> Hashable:
    """All that decides how a tree is treated, but for tensors' values. Raises _Other."""
    kind = type(tree)
    if kind is dict:
        return kind, tuple(tree), tuple([_describe(value, leaves) for value in tree.values()])
    if kind is list or kind is tuple:
        return kind, tuple([_describe(value, leaves) for value in tree])
    leaves.append(tree)
    if isinstance(tree, torch.Tensor):
        return kind, tree.shape, tree.dtype, tree.requires_grad, tree.layout, tree.is_nested, tree.device.type
    if kind in PLAIN:
        return kind, tree
    raise _Other
