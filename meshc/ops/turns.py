"""Turns of ranks along a split sequence: the part of the rows that a rank computes at each call, and `meshc::in_turn`, their join.

    turn      0        1        2        3            of 3 ranks, rows in 2 parts
    rank 0    part 0   part 1
    rank 1             part 0   part 1
    rank 2                      part 0   part 1       the last begins 2 turns later: each rank idles 2 turns of 4

All ranks have one program: a call for each turn, which knows its rank's place in the chain and does nothing when it has no part to take.
State passes along the chain from the first rank to the last, or, with `back`, from the last to the first.

    in_turn(made, dim, place, ranks, back) -> concatenation along `dim` of this rank's parts among `made`, the results of its calls

`turn` makes the operator of such calls from the function of one part's steps:

    NAME(..., handed, ..., slot, parts, place, ranks) -> (..., state)      operands and results as the function's, but of all rows;
                                                                           handed, state: of a part, with a first dim of size 1
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from meshc.ir.functions import Function
from meshc.ops.definition import by_name, define, misfit, operator

ALONG: Final = "along"
"""The argument that says along which dim an operator's rows are, where no number does."""
PARTED: Final[dict[str, tuple[str, ...]]] = {}
"""Operator of a turn, by name -> operands of which it reads one part of the rows."""


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
        """The rows of `part` of `x`; of the first part if it has none."""
        rows = x.shape[dim] // self.parts
        return x.narrow(dim, (self.part or 0) * rows, rows)


def turn(
    name: str, rows: Mapping[str, int | None], back: Callable[..., bool], results: Callable[..., tuple[Tensor, ...]],
    fit: Callable[..., None], edge: str | None = None,
) -> Callable[[Function], torch.library.CustomOpDef]:  # fmt: skip
    """A decorator that registers `meshc::name`: calls of the function, which takes the steps of one part of the rows.

    rows     operands with rows -> their dim; None: the argument `along` says it
    back     whether the chain runs from the last rank to the first
    results  of a part, empty, the state last;  fit  raises for a part's operands, or a number of `parts`, that do not fit
    edge     the operand with the state of all rows before the chain's first rank; as `handed` the function gets a part of it there,
             what the rank before has handed on elsewhere

    Functions are called with those of the function's arguments, of a part, that they have parameters for, and with `operator`, the name,
    and `parts`.
    """

    def register(steps: Function) -> torch.library.CustomOpDef:
        names = [*inspect.signature(steps).parameters]
        begin, _, end = torch.library.infer_schema(steps, mutates_args=()).rpartition(") -> ")
        schema = f"{begin}, SymInt slot, SymInt parts, SymInt place, SymInt ranks) -> {end}"
        PARTED[f"meshc.{name}"] = tuple(rows)

        def of_part(args: Sequence[Any]) -> tuple[dict[str, Any], bool]:
            """Arguments of this turn's part, and whether there is one; else those of the first part."""
            given, (slot, parts, place, ranks) = dict(zip(names, args[:-4], strict=True)), args[-4:]
            found = Turn(slot, parts, place, ranks, by_name(back)(given))
            dims = {one: given[ALONG] if dim is None else dim for one, dim in rows.items() if given[one] is not None}
            _fit_rows(name, {one: (given[one], dim) for one, dim in dims.items()}, found, given["handed"])
            mine = {one: found.of(given[one], dim) for one, dim in dims.items()}
            handed = None if given["handed"] is None else given["handed"][0]
            given |= {**mine, "handed": handed}
            by_name(fit)({**given, "operator": name, "parts": parts})
            begun = None if edge is None else given[edge]
            return given | {"handed": handed if found.link else begun}, found.part is not None

        def empty(given: dict[str, Any]) -> tuple[Tensor, ...]:
            *made, state = by_name(results)(given)
            return *made, state.unsqueeze(0)

        def call_part(*args: Any) -> Any:
            given, takes = of_part(args)
            if not takes:
                return _alone(tuple(one.zero_() for one in empty(given)))
            made = steps(**given)
            *others, state = made if isinstance(made, tuple) else (made,)
            return _alone((*others, state.unsqueeze(0)))

        return define(name, schema, call_part, lambda *args: _alone(empty(of_part(args)[0])))

    return register


def _alone(made: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return made if len(made) > 1 else made[0]


def _fit_rows(name: str, operands: Mapping[str, tuple[Tensor, int]], turn: Turn, handed: Tensor | None) -> None:
    """Raises ValueError unless the operands have as many rows, which divide into parts, and the turn is one of the chain's."""
    counts = {x.shape[dim] if 0 <= dim < x.dim() else -1 for x, dim in operands.values()}
    fits = (len(counts) == 1 or turn.parts == 1) and turn.parts > 0 and turn.ranks > 0 and (handed is None or handed.shape[:1] == (1,))
    if not fits or min(counts) < 0 or min(counts) % turn.parts or not 0 <= turn.slot < turn.parts + turn.ranks - 1:
        rule = (
            f"operands have as many rows, {turn.parts} equal parts, of which {turn.ranks} ranks take each in one of "
            f"{turn.parts + turn.ranks - 1} turns, here in {turn.slot}; what is handed on is of one part, behind a dim of size 1"
        )
        raise misfit(name, rule, **{one: x for one, (x, _) in operands.items()}, handed=handed)


def _fit(made: Sequence[Tensor], dim: int, ranks: int) -> None:
    alike = bool(made) and all((one.shape, one.dtype, one.device) == (made[0].shape, made[0].dtype, made[0].device) for one in made)
    if not alike or not 0 <= dim < made[0].dim() or not 0 < ranks <= len(made):
        rule = f"what turns make is of one shape, of which {dim} is a dim, and there are at least as many turns as ranks, {ranks}"
        raise misfit("in_turn", rule, **{f"turn {index}": one for index, one in enumerate(made)})


def _empty_joined(made: Sequence[Tensor], dim: int, ranks: int) -> Tensor:
    shape = list(made[0].shape)
    shape[dim] *= len(made) - ranks + 1
    return made[0].new_empty(shape)


@operator("in_turn", results=_empty_joined, fit=_fit)
def in_turn(made: Sequence[Tensor], dim: int, place: int, ranks: int, back: bool) -> Tensor:
    parts = len(made) - ranks + 1
    first = Turn(0, parts, place, ranks, back).link
    return torch.cat(list(made[first : first + parts]), dim)
