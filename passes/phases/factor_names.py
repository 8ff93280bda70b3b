"""Names of factor classes for plans, and the batch dim of each input (`passes/place/find_factors.py` assigns them)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from meshc.ir.sharding import Part, Sharding
from meshc.passes.phases.factors import Factors, Value


@dataclass(frozen=True)
class BatchDims:
    """The batch dim of each input.

    dims     by input: its batch dim; None: it has none
    factors  by input whose batch was found: the factors of that dim that are the batch
    unclear  by input whose batch dim is not clear: why, and what to write in the plan
    ordered  classes along which operators depend on position: steps, windows, keys
    """

    dims: Mapping[str, int | None] = field(default_factory=dict)
    factors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unclear: Mapping[str, str] = field(default_factory=dict)
    ordered: frozenset[int] = frozenset()

    def of(self, name: str, dims: Sequence[tuple[int, ...]]) -> tuple[int | None, tuple[int, ...]]:
        """An input's dim that is called batch (the first, where it is not clear), and the batch factors of that dim. `dims`: the factors of
        each dim."""
        first = self.dims.get(name, 0)
        return first, () if first is None else self.factors.get(name, dims[first])


@dataclass
class FactorNames:
    """`of` gives each class its name; `also` further names it answers to (`kv_heads` is also `heads`).

    `attention` and `products` are the operators of the regions of these names. `sums`: of gradients that autograd adds up, which belong to
    no module, the modules of their summands. `ones` are names of dims of size 1: no class has them, since there is nothing to split, but a
    plan may name them (a last batch of one row). `batch`: the batch dims of inputs.
    """

    of: dict[int, str] = field(default_factory=dict)
    also: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    attention: set[Node] = field(default_factory=set)
    products: set[Node] = field(default_factory=set)
    sums: dict[Node, frozenset[str]] = field(default_factory=dict)
    ones: set[str] = field(default_factory=set)
    batch: BatchDims = BatchDims()

    def copy(self) -> FactorNames:
        """An independent copy."""
        also = defaultdict(set, {factor: set(names) for factor, names in self.also.items()})
        return FactorNames(dict(self.of), also, set(self.attention), set(self.products), dict(self.sums), set(self.ones), self.batch)

    def whole_sharding(self, factors: Factors, value: Value) -> Sharding:
        """The unsharded type of a value: its dims with the names of their factors."""
        return Sharding(tuple(tuple(Part(self.of[factor], factors.size[factor]) for factor in row) for row in factors.dims[value]))

    def name_factor(self, factor: int, name: str, *also: str) -> None:
        self.of.setdefault(factor, name)
        self.also[factor] |= {name, *also} if self.of[factor] == name else set(also)
