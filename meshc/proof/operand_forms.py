"""Forms in which the operands of a traced call may be among what a line is made of, in a proof: which tiles each is, in which sharding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from torch.fx import Node

from meshc.ir import value_of
from meshc.ir.sharding import Part, Sharding
from meshc.proof.evaluate import Evaluator
from meshc.proof.facts import Fact, Facts, Form, whole_sharding
from meshc.proof.lowering_recorder import LoweringWay
from meshc.proof.regrouped import Parts, without_names
from meshc.proof.tiles import Tiles, Unfit, in_home_order, tiles_of
from meshc.proof.traced import TracedTerms
from meshc.rules.result_shardings import runs_of
from meshc.rules.rule import Rule, Turns

MOST_PARTS: Final = 32
"""Parts in which the rows of a recurrence may take turns."""


class OperandForms:
    def __init__(self, traced: TracedTerms, evaluator: Evaluator, facts: Facts) -> None:
        self._traced, self._evaluator, self._facts = traced, evaluator, facts

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
