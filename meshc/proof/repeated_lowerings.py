"""Lowerings that hold for other operands too, in a proof: layers that are alike are proved once.

    mm_7 = mm(x_7, w_7)          the rule of mm writes this line for tiles of x and w that are split so: shown by writing it once more
    mm_9 = mm(x_9, w_9)          the same line, the same call, operands split in the same way: shown already

What a rule writes for a call, and that it is the line, does not depend on which values the operands are. So a lowering that has been
shown is kept under the line and the call with the operands' values as letters; a line with the same letters has the same proof. All else
is a part of the key as it is: what is made inside of the lowering, values that are no operands, numbers, what indices are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.fx import Node

from meshc.ir import operands, records, value_of
from meshc.ir.sharding import Sharding
from meshc.proof.evaluate import Evaluator
from meshc.proof.facts import Form, is_value
from meshc.proof.held import JoinedValues, Several
from meshc.proof.terms import arguments
from meshc.proof.tiles import Tiles
from meshc.proof.traced import TracedTerms
from meshc.rules.rule import Rule

LETTERS: Final = ("port", "call", "item", "sum", "slice")
"""Kinds of terms that a lowering does not look into; what it may, as one number everywhere, is no letter."""
READERS: Final = 3
"""Rings look at who reads a gradient, so many readers on."""


@dataclass(frozen=True)
class ShownLowering:
    """What a line is by a lowering: its sharding, (axis, what its padding holds), and of other results of the call the shardings."""

    sharding: Sharding
    padding: tuple[tuple[str, float], ...]
    others: tuple[tuple[int, Sharding], ...] = ()


class RepeatedLowerings:
    def __init__(self, traced: TracedTerms, evaluator: Evaluator) -> None:
        self._traced, self._evaluator = traced, evaluator
        self._shown: dict[Hashable, ShownLowering] = {}
        self._calls: dict[Node, tuple[Hashable, list[Tiles], list[bool]]] = {}

    def find(self, key: Hashable) -> ShownLowering | None:
        return self._shown.get(key)

    def keep(self, key: Hashable, row: Sequence[Form], shown: ShownLowering) -> None:
        """Keeps a lowering that has been shown for forms of operands, if all that these rest on is where their elements are."""
        if all(is_value(fact.value, fact.sharding, tiles, self._evaluator.sizes) for tiles, fact in row):
            self._shown[key] = shown

    def key(self, line: Tiles | JoinedValues, sharding: Sharding | None, n: Node, index: int, rule: Rule) -> Hashable:
        """The line as result `index` of the traced call `n`, with letters for the values of the call's operands."""
        if n not in self._calls:
            self._calls[n] = self._call(n, rule)
        call, values, are_integers = self._calls[n]
        letters: dict[int, int] = {}
        for value, is_integer in zip(values, are_integers, strict=True):
            if not is_integer and self._traced.terms.term(value.root)[0] in LETTERS:
                letters.setdefault(value.root, len(letters))
        known = tuple(self._evaluator.numel[root] for root in letters)
        return call, index, sharding, known, tuple(self._rows((line, *values), letters))

    def _call(self, n: Node, rule: Rule) -> tuple[Hashable, list[Tiles], list[bool]]:
        made = [value_of(one) for one in operands(n)]
        types = [(one.shape, one.dtype) for one in (*records(n), *(records(node)[at] for node, at in made))]
        key = n.target, _constants(n), tuple(types), _readers(n, READERS) if rule.rings else ()
        integers = [dtype is None or not (dtype.is_floating_point or dtype.is_complex) for _, dtype in types[len(records(n)) :]]
        return key, [self._traced.values[one] for one in made], integers

    def _rows(self, first: tuple[Any, ...], letters: Mapping[int, int]) -> Iterator[Hashable]:
        """What is given, and the terms inside of it, each by its number among them."""
        inside: dict[int, int] = {}
        work: list[int] = []

        def name(root: int) -> Hashable:
            if root in letters:
                return "letter", letters[root]
            if root in self._traced.known:
                return "value", root
            if root not in inside:
                inside[root] = len(inside)
                work.append(root)
            return "inside", inside[root]

        def rewrite(argument: Any) -> Hashable:
            if isinstance(argument, Tiles):
                return name(argument.root), argument.dims, argument.axes, argument.partial, argument.padding, argument.uneven
            if isinstance(argument, Several):
                return name(argument.number)
            if isinstance(argument, JoinedValues):
                return "joined", argument.dim, argument.merged, rewrite(argument.pieces)
            return tuple(map(rewrite, argument)) if isinstance(argument, tuple) else argument

        yield rewrite(first)
        for root in work:
            what, *rest = self._traced.terms.term(root)
            yield what, *((name(rest[0]), *rest[1:]) if what == "item" else map(rewrite, rest))


def _constants(n: Node) -> Hashable:
    return arguments(n.args, lambda _: "operand"), arguments(n.kwargs, lambda _: "operand")


def _readers(n: Node, depth: int) -> Hashable:
    """The calls that read a value, and those that read these."""
    return tuple((user.target, _constants(user), _readers(user, depth - 1)) for user in n.users if user.op != "output") if depth else ()
