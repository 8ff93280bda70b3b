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
"""Forms that are memoised at most; the table is cleared when it is full."""


class Form:
    """The form of a call's arguments; compared by identity. `keys`: the caller's cache keys for calls of this form."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: dict[Hashable, Any] = {}


class _Other(Exception):
    """Something in a tree that has no form."""


class Forms:
    """The memo table of forms."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Form] = {}

    def of(self, tree: object) -> tuple[list[object], Form | None]:
        """The leaves of a tree in order, and its form; ([], None) if something in the tree has no form."""
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
    """A hashable description of a tree without its tensors' values; appends the leaves to `leaves`. Raises _Other."""
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
