"""Type of sharding rules: letters for the dims of one operator's operands and results; and rules from text written like an einsum.

    "m k, k n -> m n +k"         a contraction: k is gone from the result, so sharding it leaves the result partial (sum)
    "... c! -> ... c!"           c must be whole (a softmax); `...` stands for the leading dims
    "b i, o i -> b o +i | o"     several results, separated by |; a result is partial only over letters with + before them
    "_"                          a dim of size 1, or one that broadcasts: no letter

Letters are local to one operator. A letter may stand for a dim that is a product of factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch.fx import Node

from meshc.ir import records, value_of
from meshc.ir.functions import Target
from meshc.ir.schemas import named_arguments
from meshc.ir.window import Window

Dims = tuple[str, ...]
Made = Node | Sequence[Node | None]
"""Result of `lower`: a node for each result, None for one that nobody reads."""
ONE = "_"
Extents = Mapping[str, Sequence[Node | int]]
"""The arguments `global_shape`, `local_shape` and `offsets` of an operator that works by global index."""
CPU: Final = torch.device("cpu")
Positions = tuple[tuple[int, ...], ...]
ALONE: Final[Positions] = ((0,),)
"""`linear` of an operator that is linear in its first operand."""

ROLES: Final[Mapping[str, str]] = {
    "contracts": "a product sums over it, between what comes in and what it is multiplied by",
    "makes": "what a product makes of its weight: features, channels",
    "multiplies": "a product of two matrices for each",
    "weighs": "along it lie weights that add up to one",
    "heads": "attention's heads",
    "head": "what one head of attention compares",
    "queries": "what attention looks from",
    "vocabulary": "of these an index that is an input, or a label, names one",
    "experts": "routed experts, or groups of them: of these a row's choice names one",
    "hidden": "the features that a model's layers hand on: what is embedded, what is normalised",
}
"""Roles of letters in a model, by which `place/find_factors.py` finds the factors that a plan calls `heads`, `ffn` or `vocab`."""


def all_operands(count: int) -> Positions:
    """`linear` of an operator that is linear in all of its operands together."""
    return (tuple(range(count)),)


@dataclass(frozen=True)
class Relation:
    """Dims `inside` (of the operand) and `outside` (of the result) that hold the same elements in the same order.

    A letter starting with `#` is virtual: it stands for `#N` tiles of which the operator selects or fills one (or all, in a `cat`).
    A soft relation holds only where other operators already factor the dim that way.
    """

    inside: Dims
    outside: Dims
    soft: bool = False


@dataclass(frozen=True)
class RingLetter:
    """A letter whose blocks may pass round a ring of ranks: `lower` handles one block at a time.

    operands  positions of operands that pass round, split by the axis that splits the queries
    results   positions of results that travel with them as sums over the blocks, and return complete to their rank
    zigzag    whether blocks may be in zigzag order, which gives every rank equal work
    apart     whether blocks may stay on their ranks, if nothing else is split, and the results be joined
    """

    letter: str
    operands: tuple[int, ...]
    results: tuple[int, ...] = ()
    zigzag: bool = False
    apart: bool = False


@dataclass(frozen=True)
class RecurrentLetter:
    """A letter whose positions are steps of a recurrence.

    letter  the steps; where it is split, ranks may run their tiles in turns (`turns.py`)
    parts   letters with independent positions, of which a turn may run a part
    joins   whether tiles compose, so that all ranks may also run theirs at once and join the results
    """

    letter: str
    parts: tuple[str, ...]
    joins: bool


@dataclass(frozen=True)
class Turns:
    """Turns of an operator's steps: the letter that is divided into parts, and the number of parts."""

    letter: str
    parts: int


@dataclass(frozen=True)
class Rule:
    """Letters of one operator instance.

    kind     compute: shards its letters by the plan; layout: computes nothing, has no preference; carry: keeps a split that operands share;
             update: as the state of its parameter is stored; stored: as the parameter itself is
    sums     for each result, letters whose sharding leaves that result partial, with the reduction; (): there are none
    whole    letters that may not be sharded
    linear   sets of operand positions; the operator is additive in those of each set, together, while the others are whole. If empty,
             `linear` and `defers` are those of the operator's record (`operator.py`)
    defers   whether `propagate` defers reductions of sums past the operator, in the operands of the first set of `linear`
    always   whether it does so whatever that costs: they are to be taken in the dtype of the result
    roles    letter -> role in a model (`ROLES`), for names of factors
    lower    builds the per-rank code; None: the same operator on local operands
    once     operands that `lower` keeps on the first tile of summed letters, with zeros elsewhere
    first    one of them, where `lower` does nothing else
    neutral  value of padding along a summed letter, and beyond the ends of a window (0, or an infinity for max and min)
    clean    operands whose padding must always be zero (indices)
    shrinks  a layout operator whose result is smaller: a reshard is cheaper after it
    self_masked  `lower` masks padding itself
    major    letters whose first factor only may be sharded (their positions must be a range)
    settles  a layout operator past which no reduction may be deferred
    accumulates  the result is partial over the microbatches
    fills    a layout operator whose result need not be zero where its first operand is
    zigzag   letters whose tiles are in zigzag order for its kernel
    windows  letter -> (letter, Window): a tile of the first goes with a window of the second, so an axis splits both or neither
    rings    letter -> the letter whose blocks can pass round a ring where one axis splits the first letter
    steps    the letter of a recurrence's steps, or None
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sums: tuple[dict[str, str], ...] = ()
    whole: AbstractSet[str] = frozenset()
    relations: tuple[Relation, ...] = ()
    kind: str = "compute"
    linear: Positions = ()
    defers: bool = False
    always: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    lower: Callable[[Local], Made] | None = None
    once: AbstractSet[int] = frozenset()
    first: int | None = None
    neutral: float = 0.0
    shrinks: bool = False
    self_masked: bool = False
    clean: tuple[int, ...] = ()
    major: AbstractSet[str] = frozenset()
    settles: bool = False
    accumulates: bool = False
    fills: bool = False
    zigzag: AbstractSet[str] = frozenset()
    windows: dict[str, tuple[str, Window]] = field(default_factory=dict)
    rings: Mapping[str, RingLetter] = field(default_factory=dict)
    steps: RecurrentLetter | None = None

    @property
    def ring_operands(self) -> tuple[int, ...]:
        """Positions of the operands that may pass round a ring."""
        return tuple(position for passing in self.rings.values() for position in passing.operands)

    @property
    def ring_results(self) -> tuple[int, ...]:
        """Positions of the results that travel with them and return to their rank."""
        return tuple(position for passing in self.rings.values() for position in passing.results)

    @property
    def keeps_zeros(self) -> bool:
        """Whether padding of zeros in the first operand is padding of zeros in the results, and whatever it is counts in none: a layout
        operator that reduces nothing, unless it fills."""
        return self.kind == "layout" and not any(self.sums) and not self.fills

    @property
    def adds(self) -> bool:
        """Whether one reduction of the result may replace a reduction of each operand."""
        return self.defers and any(len(positions) > 1 for positions in self.linear)


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

    def call(self, *operands: Node, **changed: object) -> Node:
        """The operator itself on these operands, with its other arguments unchanged, but for positional ones that are given by name."""

    def arguments(self) -> dict[str, Any]:
        """All arguments of the call by name, in order, operands as they are on the rank."""

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

    def positions(self, letter: str, dtype: torch.dtype = torch.int64, device: torch.device = CPU) -> Node:
        """The global index of every local position of a letter, whichever of its factors are split; of a dim of size 1 the index 0."""

    def tiles(self, index: int) -> Extents:
        """Result `index`, with a dim for each factor, for random draws."""

    def tile(self, letters: Sequence[str]) -> Extents:
        """The rank's tile of these letters, with a dim for each factor."""

    def weights_drawn(self, letters: Sequence[str], back: Mapping[str, int]) -> Extents:
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

    def before_expansion(self, x: Node, turned: bool) -> tuple[Node, Callable[[Node], Node]]:
        """(x before it was repeated along some of its dims, what repeats a value of that shape likewise). `turned`: the dims of the first
        may be in another order; else its last two are those of x."""

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


RuleFunction = Callable[[Node, list[Node]], Rule | None]


def shape_of(node: Node) -> tuple[int, ...]:
    producer, index = value_of(node)
    return records(producer)[index].shape


def dtype_of(node: Node) -> torch.dtype:
    producer, index = value_of(node)
    found = records(producer)[index].dtype
    assert found is not None
    return found


def integer(argument: object) -> int:
    """An argument of a call that the operator's schema types as int."""
    assert isinstance(argument, int)
    return argument


def dim_of(node: Node, dims: Sized) -> int:
    """The argument `dim` of a call as an index into a shape, or into its letters, from 0."""
    return integer(named_arguments(node)["dim"]) % len(dims)


def letters_of(value: Node, prefix: str = "d") -> Dims:
    """A letter for each dim of a value, or of the first result of a call: d0, d1, ..."""
    return tuple(f"{prefix}{dim}" for dim in range(len(shape_of(value))))


def dims_of(prefix: str, shape: Sequence[int]) -> Dims:
    """A letter for each dim, but for those of size 1."""
    return tuple(ONE if size == 1 else f"{prefix}{dim}" for dim, size in enumerate(shape))


def result_shapes(node: Node) -> list[tuple[int, ...]]:
    return [result.shape for result in records(node)]


def _longest(texts: Sequence[Sequence[str]], shapes: Sequence[Sequence[int]], least: int) -> int:
    """The largest number of dims that `...` stands for, at least `least`."""
    return max([least, *(len(shape) - len(tokens) + 1 for tokens, shape in zip(texts, shapes, strict=True) if "..." in tokens)])


def _without_sums(tokens: Sequence[str], lead: int) -> tuple[list[str], dict[str, str]]:
    """(letters of a result, reductions over its summed letters)."""
    summed = [_lead(lead) if token == "+..." else [token[1:]] for token in tokens if token.startswith("+")]
    return [token for token in tokens if not token.startswith("+")], {letter: "sum" for letters in summed for letter in letters}


def einsum(text: str, node: Node, tensors: Sequence[Node], **changes: Any) -> Rule:
    """A Rule from its text, for the shapes of `tensors`, without operands that are None. Raises ValueError if the text does not fit."""
    left, right = text.split("->")
    whole: set[str] = set()
    operand_texts = [part.split() for part in left.split(",")] if left.strip() else []
    result_texts = [part.split() for part in right.split("|")]
    if len(operand_texts) != len(tensors):
        raise ValueError(f"rule {text!r} has {len(operand_texts)} operands, {node.name} has {len(tensors)}")
    out_shapes = result_shapes(node)
    sizes: dict[str, int] = {}
    lead = _longest(operand_texts, [shape_of(t) for t in tensors], 0)
    made = [result.dtype is not None for result in records(node)]
    result_texts = [tokens if there else [] for tokens, there in zip(result_texts, made, strict=False)]
    sums: list[dict[str, str]] = []
    stripped: list[list[str]] = []
    for tokens, shape in zip(result_texts, out_shapes, strict=False):
        kept, summed = _without_sums(tokens, lead)
        lead = _longest([kept], [shape], lead)
        stripped.append(kept)
        sums.append(summed)

    def dims(tokens: list[str], shape: tuple[int, ...]) -> Dims:
        letters: list[str] = []
        for token in tokens:
            if token == "...":
                count = len(shape) - len(tokens) + 1
                letters += _lead(lead)[lead - count :]
            else:
                letters.append(token.rstrip("!"))
                if token.endswith("!"):
                    whole.add(token[:-1])
        if len(letters) != len(shape):
            raise ValueError(f"rule {text!r} does not fit shape {shape} of {node.name}")
        for position, (letter, size) in enumerate(zip(letters, shape, strict=True)):
            if size == 1 and sizes.get(letter, 1) != 1 or letter == ONE:
                letters[position] = ONE
            elif sizes.get(letter, 1) not in (1, size):
                raise ValueError(f"rule {text!r} gives {letter} two sizes, {sizes[letter]} and {size}, in {node.name}")
            else:
                sizes[letter] = size
        return tuple(letters)

    results = tuple(dims(tokens, shape) for tokens, shape in zip(stripped, out_shapes, strict=False))
    for _ in range(2):  # the sizes of all letters come first, so that a dim of size 1 that broadcasts is recognised
        operands = tuple(dims(tokens, shape_of(tensor)) for tokens, tensor in zip(operand_texts, tensors, strict=True))
    return Rule(operands, results, tuple(sums), whole, **changes)


def by_text(text: str, **fields: Any) -> RuleFunction:
    """A rule function with the same text, and the same fields of `Rule`, for all calls."""
    return lambda node, tensors: einsum(text, node, tensors, **fields)


def count_once(local: Local, x: Node) -> Node:
    """x on the first rank along the axes over which the result is partial, zeros on the others."""
    return local.keep_first(x, [axis for letter in local.rule.sums[0] for axis in local.axes(letter)])


def draw(local: Local) -> Node:
    """A lowering to the operator itself on its tile of a result that it draws by global index."""
    return local.call(*local.operands, **local.tiles(0))


def where_split(letter: str, lower: Callable[[Local], Made]) -> Callable[[Local], Made]:
    """A lowering to the operator itself unless a letter is split."""
    return lambda local: lower(local) if local.axes(letter) else local.call(*local.operands)


def with_local_shape(name: str) -> Callable[[Local], Node]:
    """A lowering to the operator itself, with the local shape of its result as argument `name`."""
    return lambda local: local.call(*local.operands, **{name: list(local.out_shape(0))})


def whole_rule(node: Node, tensors: Sequence[Node]) -> Rule:
    """A rule with all dims whole: for calls on scalars of operators whose rule needs a dim."""
    operands = tuple(tuple(f"x{k}.{d}" for d in range(len(shape_of(t)))) for k, t in enumerate(tensors))
    results = tuple(tuple(f"y{k}.{d}" for d in range(len(shape))) for k, shape in enumerate(result_shapes(node)))
    return Rule(operands, results, whole={letter for dims in (*operands, *results) for letter in dims})


def _lead(count: int) -> list[str]:
    return [f"*{index}" for index in range(count)]


def broadcast_dims(operand: Sequence[int], shape: Sequence[int], letters: Dims) -> Dims:
    """The dims of an operand that broadcasts to a shape of these letters."""
    shift = len(shape) - len(operand)
    return tuple(ONE if size == 1 and shape[shift + i] != 1 else letters[shift + i] for i, size in enumerate(operand))


def pointwise(node: Node, tensors: Sequence[Node], **changes: Any) -> Rule:
    """The rule of a pointwise operator, whose operands broadcast to the result."""
    shapes = result_shapes(node)
    letters = tuple(_lead(len(shapes[0])))
    return Rule(tuple(broadcast_dims(shape_of(t), shapes[0], letters) for t in tensors), (letters,) * len(shapes), **changes)
