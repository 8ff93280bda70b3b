"""Names: what a plan may call the factor classes of a graph (`names` gives them)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node


@dataclass(frozen=True)
class BatchDims:
    """Where inputs have the batch.

    dims     by input; None: it has none
    factors  by input, of what was found: the factors of that dim which are the batch
    unclear  of inputs of which it is not clear: why, and what to write
    ordered  classes that operators go along: steps, windows, keys
    """

    dims: Mapping[str, int | None] = field(default_factory=dict)
    factors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unclear: Mapping[str, str] = field(default_factory=dict)
    ordered: frozenset[int] = frozenset()

    def of(self, name: str, dims: Sequence[tuple[int, ...]]) -> tuple[int | None, tuple[int, ...]]:
        """The dim of an input that is called batch, and the factors of it that are: the first, where it is not clear."""
        first = self.dims.get(name, 0)
        return first, () if first is None else self.factors.get(name, dims[first])


@dataclass
class Names:
    """`of` gives each class its name; `also` further names it answers to (`kv_heads` is also `heads`).

    `attention` and `products` are the operators of the regions that have these names. `sums` are gradients that autograd adds up, which no
    module does: the modules that their parts are made in. `ones` are names of dims of size 1: no class has them, since there is nothing to
    split, but a plan may speak of them (a last batch of one row). `batch` is where inputs have it.
    """

    of: dict[int, str] = field(default_factory=dict)
    also: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    attention: set[Node] = field(default_factory=set)
    products: set[Node] = field(default_factory=set)
    sums: dict[Node, frozenset[str]] = field(default_factory=dict)
    ones: set[str] = field(default_factory=set)
    batch: BatchDims = BatchDims()

    def copied(self) -> Names:
        """Names that may be added to."""
        also = defaultdict(set, {factor: set(names) for factor, names in self.also.items()})
        return Names(dict(self.of), also, set(self.attention), set(self.products), dict(self.sums), set(self.ones), self.batch)

    def set(self, factor: int, name: str, *also: str) -> None:
        self.of.setdefault(factor, name)
        self.also[factor] |= {name, *also} if self.of[factor] == name else set(also)
