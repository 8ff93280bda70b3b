"""Names: what a plan may call the factor classes of a graph (`names` gives them)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch.fx import Node


@dataclass
class Names:
    """`of` gives each class its name; `also` further names it answers to (`kv_heads` is also `heads`).

    `attention` and `products` are the operators of the regions that have these names. `sums` are gradients that autograd adds up, which no
    module does: the modules that their parts are made in. `ones` are names of dims of size 1: no class has them, since there is nothing to
    split, but a plan may speak of them (a last batch of one row).
    """

    of: dict[int, str] = field(default_factory=dict)
    also: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    attention: set[Node] = field(default_factory=set)
    products: set[Node] = field(default_factory=set)
    sums: dict[Node, frozenset[str]] = field(default_factory=dict)
    ones: set[str] = field(default_factory=set)

    def copied(self) -> Names:
        """Names that may be added to."""
        also = defaultdict(set, {factor: set(names) for factor, names in self.also.items()})
        return Names(dict(self.of), also, set(self.attention), set(self.products), dict(self.sums), set(self.ones))

    def set(self, factor: int, name: str, *also: str) -> None:
        self.of.setdefault(factor, name)
        self.also[factor] |= {name, *also} if self.of[factor] == name else set(also)
