"""Random rounding mode for a model on one device (Monte Carlo arithmetic), and factors by which measured movement widens bounds.

A norm over few values (batch norm over four images of one pixel) computes x - mean of values that are nearly equal: a rounding in the last
place becomes a large part of the difference, the input of the next layers. So two correct programs that add in another order differ by
hundreds of units in the last place. The reference is run some times more, each rounded result changed by up to one unit in the last place
at random (Monte Carlo arithmetic, Parker 1997); correct programs were found to differ by at most 1.5 times the movement that this shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeGuard

import torch
from torch import Tensor

from meshc.ir import trees
from meshc.ir.functions import Keywords
from meshc.ir.schemas import written_operands
from meshc.private import OpOverload, TorchDispatchMode

RUNS: Final = 3
TIMES: Final = 4
"""Factor on the movement of the model's own results by which a program may differ."""
MOST: Final = 50
"""Factor on the usual bound that outputs, gradients and the first step's results may not exceed in any case: beyond it a fault could hide.
Updated parameters, and results of later steps, have no such limit: the gradients behind them are compared by themselves."""

EXACT: Final = frozenset(
    "_to_copy _unsafe_view abs amax amin cat ceil clone constant_pad_nd copy_ detach embedding fill_ flip floor gather index index_select "
    "lift_fresh masked_fill masked_fill_ max max_pool2d_with_indices max_pool2d_with_indices_backward min neg relu relu_ repeat roll round "
    "scatter select_backward sign slice_backward sort stack threshold_backward topk tril triu where zero_".split()
)
"""Operators that do not round."""


class RoundingPerturbation(TorchDispatchMode):
    """Changes each rounded result by up to one unit in the last place, at random from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Keywords | None = None) -> object:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        rounds = any(_is_floating(leaf) for leaf in trees.leaves((args, kwargs)))
        if func.namespace != "aten" or func.is_view or name in EXACT or not rounds:
            return made
        if func._schema.is_mutable:
            for operand in filter(_is_floating, written_operands(func, args, {})):
                operand.copy_(self._perturb(operand))
            return made
        return trees.map_leaves(lambda leaf: self._perturb(leaf) if _is_floating(leaf) else leaf, made)

    def _perturb(self, value: Tensor) -> Tensor:
        unit = torch.finfo(value.dtype).eps
        return torch.empty_like(value).uniform_(1 - unit, 1 + unit, generator=self.generator).mul_(value)


def _is_floating(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
