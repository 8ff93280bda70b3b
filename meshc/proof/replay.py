"""A rule's lowering of a traced call for the forms of its operands, as terms; and which forms these may be."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.fx import Node

from meshc.errors import CompileError
from meshc.ir import Record, operands, records, value_of
from meshc.ir.open_shapes import OpenShapes
from meshc.ir.sharding import Part, Sharding, padded_parts, tile_sizes
from meshc.ir.sizes import Dynamic
from meshc.proof.evaluate import Evaluator
from meshc.proof.facts import Fact, Facts, Form, Parts, whole_sharding, without_names
from meshc.proof.held import Held, Several
from meshc.proof.lowering_recorder import Emitter, Letters, LoweringWay, RecordedLowering
from meshc.proof.tiles import Tiles, Unfit, in_home_order, tiles_of
from meshc.proof.traced import TracedTerms
from meshc.rules import in_any_order
from meshc.rules.result_shardings import SplitError, parts_of_letters, result_shardings, runs_of
from meshc.rules.rule import Rule, Turns

REFUSED: Final = (ValueError, AssertionError, LookupError, TypeError, ArithmeticError, RuntimeError, StopIteration, CompileError, Unfit)
"""What a rule raises that is asked for a lowering that it does not have."""
MOST: Final = 128
"""Lowerings of a call, each for some forms of its operands, that are tried for one line. Lines of golden programs take 9 at most."""
MOST_PARTS: Final = 32
"""Parts in which the rows of a recurrence may take turns."""
Told = tuple[Sharding | None, ...]


@dataclass(frozen=True)
class LoweringResults:
    """What a lowering gives: the terms of the results, None where there is none, and their shardings by the rule."""

    results: Sequence[Held | None]
    shardings: Sequence[Sharding]


class LoweringReplays:
    def __init__(self, traced: TracedTerms, evaluator: Evaluator, facts: Facts, sizes: Sequence[Dynamic]) -> None:
        """`sizes`: those that are open."""
        self._open = OpenShapes(sizes)
        self._traced, self._evaluator, self._facts = traced, evaluator, facts
        self._memo: dict[object, Any] = {}

    def ways(
        self, rule: Rule, tensors: Sequence[Node], leaves: Sequence[Tiles], own: Sequence[Tiles]
    ) -> Iterator[tuple[tuple[Form, ...], LoweringWay]]:
        """Forms in which the operands of a traced call may be among what a line is made of, and the ways in which a rule may be lowered.

        `own`: the operands of the line's own call, if it is of the same operator: their forms come first.
        """
        if not rule.rings:
            some = [LoweringWay(), *([LoweringWay(uses_zigzag=True, is_in_zigzag=True)] if rule.zigzag else [])]
            if rule.steps is not None:
                some += [LoweringWay(turns=Turns(letter, parts)) for parts in range(1, MOST_PARTS + 1) for letter in rule.steps.parts]
            yield from ((row, way) for row in self._forms(rule, tensors, leaves, own) for way in some)
            return
        at_home = list(dict.fromkeys(map(in_home_order, leaves)))
        ways = LoweringWay(), LoweringWay(uses_zigzag=True)
        at_once = ((row, way) for row in self._forms(rule, tensors, at_home, own) for way in ways)
        there = self._forms(rule, tensors, leaves, own) if at_home != [*leaves] else iter(())
        in_order = ((row, LoweringWay(uses_zigzag=True, is_in_zigzag=True)) for row in there)
        for pair in itertools.zip_longest(in_order, at_once):
            yield from (one for one in pair if one is not None)

    def _forms(
        self, rule: Rule, tensors: Sequence[Node], leaves: Sequence[Tiles], own: Sequence[Tiles]
    ) -> Iterator[tuple[Form, ...]]:
        values = [self._traced.values[value_of(tensor)] for tensor in tensors]
        rows: list[list[Form]] = []
        for at, value in enumerate(values):
            found: dict[object, Form] = {}
            for leaf in leaves:
                for fact in self._facts.of(leaf, value) if leaf.root == value.root else ():
                    found.setdefault((leaf, without_names(fact.sharding)), (leaf, fact))
            row = sorted(found.values(), key=lambda form: len(form[0].padding), reverse=_counts_padding(rule, at))
            if len(own) == len(values):
                first = [form for form in row if (form[0].root, form[0].dims) == (own[at].root, own[at].dims)]
                row = [*first, *(form for form in row if form not in first)]
            rows.append(row[:4])
        for at, value in enumerate(values):
            expected, fact = self._by_letters(rule, at, value, rows)
            rows[at] += [(leaf, fact) for leaf in leaves if leaf.serves(expected) and (leaf, fact) not in rows[at]]
            others = [form for form in self._facts.forms_of(value) if form not in rows[at]]  # a lowering may move its operand first
            is_read = any(leaf.root == value.root for leaf in leaves)
            rows[at] = [*rows[at][:4], *others[-4:], *([] if is_read else [(expected, fact)])]
            rows[at] = rows[at] or [(value, Fact(value, whole_sharding(value.shape)))]
        yield from _fitting(rule, rows, (), {})

    def _by_letters(self, rule: Rule, at: int, value: Tiles, rows: Sequence[Sequence[Form]]) -> Form:
        """The form of an operand that is sharded as other operands' letters and windows say: of a value that is repeated its tiles do not
        say it, and of one that is not read there are none."""
        parts: dict[str, Parts] = {}
        for place, (letters, row) in enumerate(zip(rule.operands, rows, strict=True)):
            if row and place != at:
                parts.update(zip(letters, row[0][1].sharding.dims, strict=False))
        for one, (other, _) in rule.windows.items():
            for letter, beside in ((one, other), (other, one)):
                if beside in parts and letter not in parts:
                    axes = tuple(axis for part in parts[beside] for axis in part.axes)
                    parts[letter] = (Part("", value.shape[rule.operands[at].index(letter)], axes),) if letter in rule.operands[at] else ()
        own = (parts.get(letter) or (Part("", size),) for letter, size in zip(rule.operands[at], value.shape, strict=True))
        sharding = Sharding(tuple(own))
        try:
            return tiles_of(value, sharding, self._evaluator.sizes), Fact(value, sharding)
        except Unfit:
            return value, Fact(value, whole_sharding(value.shape))

    def replay(self, n: Node, rule: Rule, row: Sequence[Form], way: LoweringWay, told: Told, is_typed: bool) -> LoweringResults:
        """What the rule's lowering of a traced call gives for these forms of its operands. Raises what is `REFUSED`.

        `told`: shardings of results, for letters that operands do not have; with `is_typed` those that types declare.
        """
        given = [fact.sharding for _, fact in row]
        parts = parts_of_letters(rule, given, told)
        results = result_shardings(n, rule, given, parts, told)
        for letter, of in parts.items():
            if not way.is_in_zigzag and any(part.order for part in of) and not in_any_order(n, rule, letter):
                raise SplitError(f"{letter} is in zigzag order, which the operator does not take")
        emitter = Emitter(self._evaluator.sizes, self._memo, self._open)
        inner: list[Node] = []
        for at, ((tiles, fact), tensor) in enumerate(zip(row, operands(n), strict=True)):
            before = next((k for k in range(at) if row[k] == row[at]), None)
            if before is not None:
                inner.append(inner[before])
                continue
            producer, i = value_of(tensor)
            x = emitter.operand(f"x{at}", Record(tiles.shape, records(producer)[i].dtype, fact.sharding))
            emitter.tiles[x] = tiles
            inner.append(x)
        declared = tuple(own if one is None or not is_typed else one for one, own in zip(told, results, strict=True))
        made = RecordedLowering(emitter, Letters(n, rule, parts, declared), inner, way).lower()
        held: dict[Node, Held] = dict(emitter.tiles)
        for x in emitter.graph.nodes:
            if x.op == "call_function":
                held[x] = self._evaluator.call(x, held.__getitem__)
        return LoweringResults(self._results(made, held), results)

    def _results(self, made: Any, held: Mapping[Node, Held]) -> list[Held | None]:
        if not isinstance(made, Node):
            return [None if x is None else held[x] for x in made]
        found = held[made]
        if isinstance(found, Several):
            pieces = [self._evaluator.piece(made, i, held.__getitem__) for i in range(len(records(made)))]
            roots = (self._evaluator.root(one.shape, "item", found.number, i) for i, one in enumerate(records(made)))
            return [root if piece is None else piece for piece, root in zip(pieces, roots, strict=True)]
        return [found]


def _fitting(
    rule: Rule, rows: Sequence[Sequence[Form]], chosen: tuple[Form, ...], letters: dict[str, object]
) -> Iterator[tuple[Form, ...]]:
    """Combinations of a form of each operand whose letters are split alike."""
    at = len(chosen)
    if at == len(rows):
        yield chosen
        return
    apart = {ring.letter for ring in rule.rings.values() if at not in ring.operands}
    for form in rows[at]:
        found = dict(letters)
        dims = [(letter, runs_of(parts)) for letter, parts in zip(rule.operands[at], form[1].sharding.dims, strict=False)]
        if all(letter in apart or found.setdefault(letter, runs) == runs for letter, runs in dims):
            yield from _fitting(rule, rows, (*chosen, form), found)


def _counts_padding(rule: Rule, at: int) -> bool:
    """Whether padding of an operand counts, unless it has been masked."""
    summed = {letter for sums in rule.sums for letter in sums} - {ring.letter for ring in rule.rings.values()}
    return at in rule.clean or not rule.self_masked and not summed.isdisjoint(rule.operands[at])


def padding_fault(rule: Rule, row: Sequence[Form], sizes: Mapping[str, int], read: Collection[int]) -> str:
    """A message about an operand whose padding would count; "" if there is none. `read`: roots of what the result is made of."""
    if rule.kind == "layout":
        return ""
    summed = {letter for sums in rule.sums for letter in sums}
    for at, (tiles, fact) in enumerate(row):
        clean = at in rule.clean
        if rule.self_masked and not clean or tiles.root not in read:
            continue
        padding, wanted = dict(tiles.padding), 0.0 if clean else rule.neutral
        for dim, _, part in padded_parts(fact.sharding, sizes):
            counts = clean or rule.operands[at][dim] in summed
            if counts and any(padding.get(axis) != wanted for axis in _padding_axes(part, sizes)):
                return f"operand {at}: what the uneven tiles of {part} add counts, and nothing says that it is {wanted}"
    return ""


def _padding_axes(part: Part, sizes: Mapping[str, int]) -> list[str]:
    """The axes over which a part is split unevenly."""
    counts = [sizes[axis] for axis in part.axes]
    extents = tile_sizes(part.size, counts)
    return [axis for axis, extent, tile, count in zip(part.cuts, extents, extents[1:], counts, strict=False) if extent != tile * count]
