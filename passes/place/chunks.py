"""The factor along which a head runs in chunks, and the tokens of its operators that are cut.

    mm  [batch 64/dp, seq 8192] in 8 chunks      batch 64/dp/chunk: 8 adjacent rows of a rank, one in each chunk
    mm  [batch 4/dp, seq 8192]                   seq 8192/chunk

An axis that splits the same factor at the product is outside the chunks: each rank cuts its tile. One that splits it further on, where
only rows are left of the product, is inside: each chunk is split over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshc.ir.sharding import tile_sizes
from meshc.ir.spmd import CHUNK
from meshc.passes.phases.chunked_head import ChunkedHead
from meshc.passes.phases.factors import Factors, Instance, Token

Chosen = Mapping[Token, Sequence[str]]


class ChunkedFactor:
    """`factor`: the class that is cut into chunks, from the head's product on; None where no rank has two rows to cut."""

    def __init__(self, chunked: ChunkedHead, factors: Factors, sizes: Mapping[str, int]) -> None:
        self.chunked, self.factors, self.sizes = chunked, factors, sizes
        self.factor: int | None = None
        self.outside: frozenset[str] = frozenset()

    def token(self, instance: Instance, chosen: Chosen) -> Token | None:
        """The token of an operator that is cut into chunks, given the axes that the mesh's axes have `chosen`; None if there is none."""
        if instance.node is self.chunked.product:
            self._settle(instance, chosen)
        if self.factor is None or instance.node not in self.chunked.nodes:
            return None
        return next((token for token in instance.size if instance.factor[token] == self.factor), None)

    def order_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of a part, with the chunk axis in its place."""
        if CHUNK not in axes:
            return tuple(axes)
        inside = [axis for axis in axes if axis not in self.outside and axis != CHUNK]
        return (*(axis for axis in axes if axis in self.outside), CHUNK, *inside)

    def _settle(self, instance: Instance, chosen: Chosen) -> None:
        axes = {instance.factor[token]: tuple(chosen.get(token, ())) for dim in instance.results[0] for token in dim}
        rows = {factor: tile_sizes(self.factors.size[factor], [self.sizes[axis] for axis in axes[factor]])[-1]
                for factor in self.chunked.tokens if type(self.factors.size[factor]) is int}  # fmt: skip
        even = [factor for factor, size in rows.items() if size % self.chunked.count == 0]
        self.factor = even[0] if even else max((factor for factor, size in rows.items() if size > 1), key=rows.__getitem__, default=None)
        self.outside = frozenset() if self.factor is None else frozenset(axes[self.factor])
