"""Microbatch split of a training step: the rows of each input, and the start of each random draw, that a microbatch takes.

    x [8, 24], target [8], weight [10]     4 microbatches, dims (0, 0, None)     microbatch 1: x[2:4], target[2:4], weight

The step is the mean of its microbatches. A microbatch is a range of the whole batch's rows, whatever the mesh; the batch must divide by
their count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshc.ir import trees


@dataclass(frozen=True)
class MicrobatchSplit:
    """How a batch is cut into `count` microbatches.

    dims   for each tensor input, in the order of a call's leaves: the dim that carries the batch, or None
    draws  the shape that each random call draws for the whole batch, by its number
    """

    count: int
    dims: tuple[int | None, ...]
    draws: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def microbatch_inputs(self, inputs: object, index: int) -> Any:
        """A call's inputs for microbatch `index`: the same structure, its rows of each tensor."""

        def rows(leaf: torch.Tensor, dim: int) -> torch.Tensor:
            size = leaf.shape[dim] // self.count
            return leaf.detach().narrow(dim, index * size, size).requires_grad_(leaf.requires_grad)

        return self._each(inputs, rows)

    def like_one(self, inputs: object) -> Any:
        """A call's inputs with the shapes of one microbatch; tensors that are split are on the meta device."""

        def empty(leaf: torch.Tensor, dim: int) -> torch.Tensor:
            shape = [size // self.count if d == dim else size for d, size in enumerate(leaf.shape)]
            return torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

        return self._each(inputs, empty)

    def _each(self, inputs: object, make: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
        dims = iter(self.dims)

        def one(leaf: object) -> object:
            dim = next(dims) if isinstance(leaf, torch.Tensor) else None
            return make(leaf, dim) if isinstance(leaf, torch.Tensor) and dim is not None else leaf

        return trees.map_leaves(one, inputs)


def offsets(whole: Sequence[int], part: Sequence[int], count: int, index: int) -> list[int] | None:
    """Start of microbatch `index` of `count` in each dim of a random draw of shape `whole`. None if the shapes do not fit."""
    if len(whole) != len(part) or any(w not in (p, p * count) for w, p in zip(whole, part, strict=True)):
        return None
    return [index * p if w != p else 0 for w, p in zip(whole, part, strict=True)]
