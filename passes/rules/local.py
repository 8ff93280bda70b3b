"""Interface of a rule's `lower`: the operator with local operands, and the tiles of its letters. `partition` implements it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.fx import Node

from meshc.ir.functions import Target

if TYPE_CHECKING:
    from meshc.passes.rules.rule import Rule, Turns


class Local(Protocol):
    """One operator being lowered: whatever it calls is written into the per-rank graph, in the place of the operator.

    operands   per-rank nodes in their wanted shardings, in the order of the operator's tensor arguments
    node       the operator in the global graph: its other arguments, its global shapes
    rule       the rule that the operator is lowered by
    """

    operands: list[Node]

    @property
    def node(self) -> Node: ...

    @property
    def rule(self) -> Rule: ...

    def emit(self, target: Target, *args: object, **kwargs: object) -> Node:
        """A call of an operator on local values; its result."""

    def call(self, *operands: Node) -> Node:
        """The operator itself on these operands, its other arguments as they are."""

    def item(self, value: Node, index: int) -> Node:
        """One result of a call that gives several."""

    def shape(self, x: Node) -> tuple[int, ...]:
        """Local shape of a value, padding included."""

    def dtype(self, x: Node) -> torch.dtype: ...

    def out_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of a result of the operator, padding included."""

    def letters(self) -> set[str]:
        """The letters of the rule that stand for something here."""

    def axes(self, letter: str) -> tuple[str, ...]:
        """Axes that split a letter."""

    def global_size(self, letter: str) -> int: ...

    def local_size(self, letter: str) -> int:
        """Positions of a tile of the letter, padding included."""

    def lies_together(self, letter: str, count: int) -> bool:
        """Whether each `count` positions of a letter that follow each other, from the first on, lie on one rank, no padding among them."""

    def start(self, letter: str, back: int = 0) -> Node | int:
        """Global index of the tile's first position; of the tile that the rank `back` places before this one has, round the ring of ranks.
        Only the major factor of the letter may be split, and to look back only by one axis."""

    def count(self, letter: str, back: int = 0) -> Node | int:
        """How many of that tile's positions are real."""

    def positions(self, letter: str, dtype: torch.dtype, device: torch.device) -> Node:
        """The global index of every local position of a letter, whichever of its factors are split; of a dim of size 1 the index 0."""

    def tiles(self, index: int) -> tuple[list[int], list[int], list[Node | int]]:
        """(global shape, local shape, offsets) of what a random operator draws, every factor a dim."""

    def tile(self, letters: Sequence[str]) -> tuple[list[int], list[int], list[Node | int]]:
        """(global shape, local shape, offsets) of a rank's tile of these letters, every factor a dim."""

    def weights_drawn(self, letters: Sequence[str], back: Mapping[str, int]) -> tuple[list[int], list[int], list[Node | int]]:
        """The same of what a random operator draws for these letters, one for each dim of its shapes; of a letter in `back` the tile of the
        rank so many places before this one."""

    def index(self, axes: Sequence[str]) -> Node:
        """This rank's place among the tiles of `axes`."""

    def ranks(self, axes: Sequence[str]) -> int:
        """How many tiles `axes` make."""

    def place(self, axis: str, back: int) -> Node:
        """The coordinate on an axis of the rank so many places before this one, round the ring."""

    def ring_shift(self, x: Node, axes: Sequence[str], steps: int) -> Node:
        """What the rank so many places before this one has as x, round the ring."""

    def reordered(self, x: Node, axes: Sequence[str], dim: int, home: bool) -> Node:
        """x, which lies in natural order along a dim, in zigzag order; or, on its way `home`, the other way round."""

    @property
    def arranged(self) -> MutableMapping[tuple[Node, object], Node]:
        """What lies in another order already, of all operators: by what it is of, and how."""

    @property
    def balanced(self) -> bool:
        """Whether what passes round is to lie in an order that gives every rank as much to do."""

    @property
    def lies_balanced(self) -> bool:
        """Whether the operands lie in that order already, and the results are to."""

    @property
    def turns(self) -> Turns | None:
        """How ranks are to take their stretches in turn; None: at once, where the rule joins stretches, else all rows in one part."""

    @property
    def parts(self) -> int:
        """In how many parts."""

    def hand_on(self, x: Node, axes: Sequence[str], dim: int, back: bool) -> Node:
        """What the rank before this one along the axes has as x, zeros at the first; or the rank behind it, zeros at the last. x has one
        position along `dim`."""

    def keep_end(self, x: Node, axes: Sequence[str], back: bool) -> Node:
        """x on the last rank along the axes (back: on the first), zeros elsewhere."""

    def all_reduce(self, x: Node, axes: Sequence[str], reduction: str) -> Node: ...

    def all_gather(self, x: Node, axes: Sequence[str], dim: int) -> Node:
        """Every tile's x along `dim`, in the order of the tiles."""

    def keep_first(self, x: Node, axes: Sequence[str]) -> Node:
        """x on coordinate 0 of the axes, zeros elsewhere."""

    def neutralise(self, x: Node, letter: str, value: float, index: int = 0) -> Node:
        """Padding of an operand (or of what has its shape) along a letter replaced by `value`."""

    def window(self, x: Node, dim: int, letter: str, fill: float = 0.0) -> Node:
        """Of a dim that `letter` has windows in: what the rank's tile of `letter` reads, `fill` beyond the ends. x if nothing is split."""

    def sum_of_windows(self, x: Node, dim: int, letter: str) -> Node:
        """The transpose: a rank's window, in terms that add up with those of its neighbours -> its tile. x if nothing is split."""

    def window_start(self, letter: str) -> Node | int:
        """Global index at which the rank's window begins, less its offset: where its tile begins, times the stride."""
