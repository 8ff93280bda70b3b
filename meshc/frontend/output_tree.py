"""The structure of a model's output: where its tensors stand, and what stands beside them.

    {"hidden": [h, None], "layers": 2}      h is the program's; None and 2 are as they were when the model was traced
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshc.ir import trees
from meshc.ir.paths import cache_paths, spec_paths


@dataclass(frozen=True)
class OutputTree:
    """A pytree's spec, and by leaf number what is no tensor (None, numbers, strings: constants of the trace, as in `torch.export`)."""

    spec: trees.Spec
    plain: Mapping[int, Any] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """What each leaf is called, plain ones included."""
        return spec_paths(self.spec)

    def caches(self) -> list[str]:
        """Paths of the leaves that lie in a key-value cache."""
        return cache_paths(self.spec)

    def build(self, tensors: Sequence[object]) -> Any:
        """The output with these tensors, in the order of their leaves. Raises ValueError if their number is another."""
        rest = iter(tensors)
        count = self.spec.num_leaves - len(self.plain)
        if len(tensors) != count:
            raise ValueError(f"{len(tensors)} tensors for an output of {count}")
        leaves = [self.plain[index] if index in self.plain else next(rest) for index in range(count + len(self.plain))]
        return trees.unflatten(leaves, self.spec)
