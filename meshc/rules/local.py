"""Interface by which a rule's `lower` emits an operator's per-rank code: operands, tiles, collectives. `partition` implements it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.fx import Node

from meshc.ir.functions import Target

if TYPE_CHECKING:
    from meshc.rules.rule import Rule, Turns


class Local(Protocol):
    """One operator during lowering: calls are emitted into the per-rank graph, in the place of the operator.

    operands          per-rank nodes in the required shardings, in the order of the operator's tensor arguments
    node              the operator in the global graph: its other arguments, its global shapes
    rule              the operator's rule
    reordered_values  reordered values, memoised over all operators: (value, order) -> reordered value
    uses_zigzag       whether the ring uses zigzag order, in which every rank has equal work
    is_in_zigzag      whether the operands are in zigzag order already, and the results must be
    turns             the turns in which ranks run their tiles; None: at once, where the rule joins tiles, else in turns of all rows
    parts             number of parts of the rows in turns; 1 by default
    """

    operands: list[Node]
    node: Node
    rule: Rule
    reordered_values: MutableMapping[tuple[Node, object], Node]
    uses_zigzag: bool
    is_in_zigzag: bool
    turns: Turns | None
    parts: int

    def emit(self, target: Target, *args: object, **kwargs: object) -> Node:
        """Emits a call of an operator on local values and returns its result."""

    def call(self, *operands: Node) -> Node:
        """The operator itself on these operands, with its other arguments unchanged."""

    def item(self, value: Node, index: int) -> Node:
        """One result of a call with several results."""

    def shape(self, x: Node) -> tuple[int, ...]:
        """Local shape of a value, padding included."""

    def dtype(self, x: Node) -> torch.dtype: ...

    def out_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of a result of the operator, padding included."""

    def letters(self) -> set[str]:
        """The letters of the rule that stand for a dim of this call."""

    def axes(self, letter: str) -> tuple[str, ...]:
        """The axes that split a letter."""

    def global_size(self, letter: str) -> int: ...

    def local_size(self, letter: str) -> int:
        """Positions of a tile of the letter, padding included."""

    def has_whole_groups(self, letter: str, count: int) -> bool:
        """Whether each group of `count` consecutive positions of a letter is on one rank, without padding in between."""

    def start(self, letter: str, back: int = 0) -> Node | int:
        """Global index of the first position of a tile: this rank's, or that of the rank `back` places before it in the ring.
        Only the major factor of the letter may be split, and for `back` only by one axis."""

    def count(self, letter: str, back: int = 0) -> Node | int:
        """Number of positions of that tile without padding."""

    def positions(self, letter: str, dtype: torch.dtype, device: torch.device) -> Node:
        """The global index of every local position of a letter, whichever of its factors are split; of a dim of size 1 the index 0."""

    def tiles(self, index: int) -> tuple[list[int], list[int], list[Node | int]]:
        """(global shape, local shape, offsets) of result `index`, with a dim for each factor, for random draws."""

    def tile(self, letters: Sequence[str]) -> tuple[list[int], list[int], list[Node | int]]:
        """(global shape, local shape, offsets) of the rank's tile of these letters, with a dim for each factor."""

    def weights_drawn(self, letters: Sequence[str], back: Mapping[str, int]) -> tuple[list[int], list[int], list[Node | int]]:
        """The same for a random draw with a dim for each of these letters; for a letter in `back`, the tile of the rank that many places
        before this one."""

    def index(self, axes: Sequence[str]) -> Node:
        """This rank's index among the tiles of `axes`."""

    def ranks(self, axes: Sequence[str]) -> int:
        """Number of tiles: the product of the sizes of `axes`."""

    def place(self, axis: str, back: int) -> Node:
        """The coordinate on an axis of the rank `back` places before this one in the ring."""

    def ring_shift(self, x: Node, axes: Sequence[str], steps: int) -> Node:
        """The x of the rank `steps` places before this one in the ring."""

    def reorder_tiles(self, x: Node, axes: Sequence[str], dim: int, home: bool) -> Node:
        """Converts x from natural to zigzag order along a dim; with `home`, from zigzag to natural order."""

    def hand_on(self, x: Node, axes: Sequence[str], dim: int, back: bool) -> Node:
        """The x of the rank before this one along the axes, zeros on the first; with `back`, of the rank behind it, zeros on the last.
        x has size 1 along `dim`."""

    def keep_end(self, x: Node, axes: Sequence[str], back: bool) -> Node:
        """x on the last rank along the axes (with `back`, on the first), zeros elsewhere."""

    def all_reduce(self, x: Node, axes: Sequence[str], reduction: str) -> Node: ...

    def all_gather(self, x: Node, axes: Sequence[str], dim: int) -> Node:
        """Concatenation of every tile's x along `dim`, in the order of the tiles."""

    def keep_first(self, x: Node, axes: Sequence[str]) -> Node:
        """x on coordinate 0 of the axes, zeros elsewhere."""

    def neutralise(self, x: Node, letter: str, value: float, index: int = 0) -> Node:
        """x with its padding along a letter replaced by `value`; x has the shape of operand `index`."""

    def window(self, x: Node, dim: int, letter: str, fill: float = 0.0) -> Node:
        """The window of `dim` that the rank's tile of `letter` reads, with `fill` beyond the ends. x if nothing is split."""

    def sum_of_windows(self, x: Node, dim: int, letter: str) -> Node:
        """The transpose of `window`: the rank's tile of the sum of all ranks' windows, which overlap. x if nothing is split."""

    def window_start(self, letter: str) -> Node | int:
        """Global start of the rank's tile times the stride: the start of its window, less the window's offset."""
