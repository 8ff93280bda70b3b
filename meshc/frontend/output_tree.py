"""Structure of a model's output: its pytree, with the constants among its leaves.

    {"hidden": [h, None], "layers": 2}      h is computed by the program; None and 2 are constants of the trace
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Final

from meshc.frontend.cache_copies import CacheCopies
from meshc.ir import trees
from meshc.ir.paths import cache_paths, is_cache, leaves_around_caches, spec_paths, specs_around_caches

AS_PASSED: Final = "the cache that was passed, each tensor where it lay"
"""Placeholder in an output for a cache that is unchanged; compared by identity."""


@dataclass(frozen=True)
class OutputTree:
    """A pytree's spec, and by leaf number the leaves that are no tensors (None, numbers, strings: constants of the trace, as in
    `torch.export`)."""

    spec: trees.Spec
    plain: Mapping[int, Any] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """The path of each leaf, constants included."""
        return spec_paths(self.spec)

    def caches(self) -> list[str]:
        """Paths of the leaves of key-value caches."""
        return cache_paths(self.spec)

    def build(self, tensors: Sequence[object]) -> Any:
        """The output with these tensors, in the order of their leaves. Raises ValueError for another number of tensors."""
        count = self.spec.num_leaves - len(self.plain)
        if len(tensors) != count:
            raise ValueError(f"{len(tensors)} tensors for an output of {count}")
        rest = iter(tensors)
        leaves = iter([self._leaf(number, rest) for number in range(self.spec.num_leaves)]) if self.plain else rest
        around = [next(leaves) if one is None else one.build(list(islice(leaves, one.spec.num_leaves))) for one in self._caches]
        return trees.build_tree(iter(around), self.spec, is_cache)

    def build_around(self, cache: object, tensors: Sequence[object]) -> Any:
        """The output with `cache` in the place of each cache; `tensors` are the leaves outside of caches."""
        rest = iter(tensors)
        leaves = [cache if number is None else self._leaf(number, rest) for number in self._around]
        return trees.build_tree(iter(leaves), self.spec, is_cache)

    @cached_property
    def _around(self) -> list[int | None]:
        return leaves_around_caches(self.spec)

    @cached_property
    def _caches(self) -> list[CacheCopies | None]:
        """For each leaf None, and for each cache what builds it."""
        return [CacheCopies(node) if is_cache(node) else None for node in specs_around_caches(self.spec)]

    def _leaf(self, number: int, tensors: Iterator[object]) -> object:
        return self.plain[number] if number in self.plain else next(tensors)
