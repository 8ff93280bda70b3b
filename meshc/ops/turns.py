"""Turns of ranks along a split sequence: the part of the rows that a rank computes at each call, and `meshc::in_turn`, their join.

    turn      0        1        2        3            of 3 ranks, rows in 2 parts
    rank 0    part 0   part 1
    rank 1             part 0   part 1
    rank 2                      part 0   part 1       the last begins 2 turns later: each rank idles 2 turns of 4

All ranks have one program: a call for each turn, which knows its rank's place in the chain and does nothing when it has no part to take.
State passes along the chain from the first rank to the last, or, with `back`, from the last to the first.

    in_turn(made, dim, place, ranks, back) -> concatenation along `dim` of this rank's parts among `made`, the results of its calls
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshc.ops.operands import misfit


@dataclass(frozen=True)
class Turn:
    """One call: its number `slot`, the number of `parts` of the rows, the rank's `place` among `ranks`, and the direction of the chain."""

    slot: int
    parts: int
    place: int
    ranks: int
    back: bool

    @property
    def link(self) -> int:
        """Number of ranks before this one in the chain."""
        return self.ranks - 1 - self.place if self.back else self.place

    @property
    def part(self) -> int | None:
        """The part that this rank computes in this turn; None if it has none."""
        part = self.slot - self.link
        return part if 0 <= part < self.parts else None

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The rows of `part` of `x`."""
        assert self.part is not None
        rows = x.shape[dim] // self.parts
        return x.narrow(dim, self.part * rows, rows)


def fit_turns(operator: str, rows: int, slot: int, parts: int, ranks: int, **operands: Tensor | None) -> None:
    """Raises ValueError unless `rows` divide into `parts`, and `slot` is one of the `parts + ranks - 1` turns."""
    if parts < 1 or ranks < 1 or rows % parts or not 0 <= slot < parts + ranks - 1:
        rule = f"{rows} rows are {parts} equal parts, of which {ranks} ranks take each in one of {parts + ranks - 1} turns, here in {slot}"
        raise misfit(operator, rule, **operands)


@torch.library.custom_op("meshc::in_turn", mutates_args=())
def in_turn(made: Sequence[Tensor], dim: int, place: int, ranks: int, back: bool) -> Tensor:
    _fit(made, dim, ranks)
    parts = len(made) - ranks + 1
    first = Turn(0, parts, place, ranks, back).link
    return torch.cat(list(made[first : first + parts]), dim)


@in_turn.register_fake
def _(made: Sequence[Tensor], dim: int, place: int, ranks: int, back: bool) -> Tensor:
    _fit(made, dim, ranks)
    shape = list(made[0].shape)
    shape[dim] *= len(made) - ranks + 1
    return made[0].new_empty(shape)


def _fit(made: Sequence[Tensor], dim: int, ranks: int) -> None:
    alike = bool(made) and all((one.shape, one.dtype, one.device) == (made[0].shape, made[0].dtype, made[0].device) for one in made)
    if not alike or not 0 <= dim < made[0].dim() or not 0 < ranks <= len(made):
        rule = f"what turns make is of one shape, of which {dim} is a dim, and there are at least as many turns as ranks, {ranks}"
        raise misfit("in_turn", rule, **{f"turn {index}": one for index, one in enumerate(made)})
