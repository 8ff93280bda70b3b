"""A rule's lowering of a traced call for the forms of its operands, as terms; and which forms these may be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.fx import Node

from meshc.errors import CompileError
from meshc.ir import Record, operands, records, value_of
from meshc.ir.open_shapes import OpenShapes
from meshc.ir.sharding import Part, Sharding, padded_parts, tile_sizes
from meshc.ir.sizes import Dynamic
from meshc.proof.emitter import Emitter
from meshc.proof.evaluate import Evaluator
from meshc.proof.facts import Facts, Form
from meshc.proof.held import Held, Several
from meshc.proof.lowering_recorder import LoweringWay, RecordedLowering
from meshc.proof.operand_forms import OperandForms
from meshc.proof.recorded_letters import Letters
from meshc.proof.tiles import Unfit
from meshc.proof.traced import TracedTerms
from meshc.rules import in_any_order
from meshc.rules.result_shardings import SplitError, parts_of_letters, result_shardings
from meshc.rules.rule import Rule

REFUSED: Final = (ValueError, AssertionError, LookupError, TypeError, ArithmeticError, RuntimeError, StopIteration, CompileError, Unfit)
"""What a rule raises that is asked for a lowering that it does not have."""
MOST: Final = 128
"""Lowerings of a call, each for some forms of its operands, that are tried for one line. Lines of golden programs take 9 at most."""
Told = tuple[Sharding | None, ...]


@dataclass(frozen=True)
class LoweringResults:
    """What a lowering gives: the terms of the results, None where there is none, and their shardings by the rule."""

    results: Sequence[Held | None]
    shardings: Sequence[Sharding]


class LoweringReplays(OperandForms):
    def __init__(self, traced: TracedTerms, evaluator: Evaluator, facts: Facts, sizes: Sequence[Dynamic]) -> None:
        """`sizes`: those that are open."""
        super().__init__(traced, evaluator, facts)
        self._open = OpenShapes(sizes)

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
        emitter = Emitter(self._evaluator.sizes, self._open)
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


def padding_fault(rule: Rule, row: Sequence[Form], sizes: Mapping[str, int], read: Collection[int]) -> str:
    """A message about an operand whose padding would count; "" if there is none. `read`: roots of what the result is made of."""
    if rule.keeps_zeros:
        return ""
    summed = {letter for sums in rule.sums for letter in sums}
    for at, (tiles, fact) in enumerate(row):
        clean = at in rule.clean
        if rule.self_masked and not clean or tiles.root not in read or 0 in tiles.shape:
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
