"""Sharding of an operator's results by its rule: a letter is split alike in all operands and results that share it.

    mm, "m k, k n -> m n +k", of [batch 4/dp, ffn 32/tp] and [ffn 32/tp, hidden 8]      gives [batch 4/dp, hidden 8] partial(sum: tp)
    mm of [batch 4/dp, ffn 32/tp] and [ffn 32, hidden 8]                                refused: k is split in one and not in the other
    relu of a value that is partial(sum: tp)                                            refused: relu does not commute with a sum

Rules are stated for global values, and queried here for the tiles of a rank, which the same operator computes from tiles. A value that
depends on the rank's coordinates otherwise `varies`; only what holds for such values too is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch.fx import Node

from meshc.check.inferred_sharding import InferredSharding, Parts, alike, dim_text, flat, partial_text, run_of, runs_of, tile
from meshc.check.types import Wrong
from meshc.ir import is_getitem, op_name
from meshc.ir.sharding import Part
from meshc.ir.spmd import MICROBATCH

if TYPE_CHECKING:
    from meshc.rules.operator import Deferral
    from meshc.rules.rule import Dims, Rule

ONE = "_"


class RulesProtocol(Protocol):
    """The queries of operator rules (`meshc.rules`) that the checker makes; a rank that only runs a program has no rules."""

    def rule_of(self, node: Node, tensors: list[Node]) -> Rule | None: ...

    def deferrals(self, node: Node, rule: Rule) -> Sequence[Deferral]: ...

    def in_any_order(self, node: Node, rule: Rule, letter: str) -> bool: ...

    def only_moves(self, node: Node) -> bool: ...

    def ranges(self, node: Node, tensors: list[Node]) -> Sequence[tuple[int, int, int, int | None]]: ...


@dataclass(frozen=True)
class RuledCall:
    """A line whose operator has a rule: its operands that are tensors, their inferred shardings, and the declared ones of its results."""

    node: Node
    rule: Rule
    tensors: Sequence[Node]
    given: Sequence[InferredSharding]
    declared: Sequence[InferredSharding]
    sizes: Mapping[str, int]

    def operand_dims(self) -> Iterator[tuple[int, int, str, Parts | None]]:
        """(position of an operand, dim, its letter, its parts) for each dim of each operand."""
        for place, (row, spread) in enumerate(zip(self.rule.operands, self.given, strict=True)):
            for dim, (letter, parts) in enumerate(zip(row, spread.dims, strict=True)):
                yield place, dim, letter, parts


def shardings_by_rule(call: RuledCall, deferrals: Sequence[Deferral]) -> list[InferredSharding]:
    """The shardings of the results.

    A line with a plain type for a result that is read is a piece, one of several lines in a rule's lowering, and may do with tiles what
    rules do not allow for global values.
    """
    rule, given = call.rule, call.given
    piece = any(call.declared[index].runs is None for index in _read_results(call.node))
    letters = _letters(call, piece)
    lost = (
        [] if any(not deferral.left for deferral in deferrals) else _letters_without_result(rule, letters)
    )  # a deferral that leaves nothing partial: only the shape of its operands is read
    if lost and not piece:
        raise Wrong(f"{op_name(call.node)} makes its result of all of [{dim_text(letters[lost[0]])}], of which a rank has a tile")
    owing = [_partial_of_sums(rule, index, letters) for index in range(len(rule.results))]
    partial = _deferred_partial(call, deferrals, owing)
    varies = any(spread.varies for spread in given) or bool(lost)
    lost += _letters_maybe_without_result(call, letters)
    results, cut = [], _split_whole_letters(call)
    for owed, dims in zip(owing, rule.results, strict=True):
        found = tuple(letters.get(letter) for letter in dims)
        unknown = lost or partial is None or owed is None or cut - set(dims)
        result = InferredSharding(found, None if unknown else {**(partial or {}), **(owed or {})}, varies=varies)
        moves = rule.kind == "layout" and bool(given)
        results.append(replace(result, padding=given[0].padding, filled=given[0].filled) if moves else result)
    if not piece:
        _check_relations(call)
    return results


def _read_results(node: Node) -> set[int]:
    """Indices of the results that are read; {0} for an operator with one result."""
    read = {user.args[1] for user in node.users if is_getitem(user) and isinstance(user.args[1], int)}
    return read or {0}


def _letters(call: RuledCall, piece: bool) -> dict[str, Parts]:
    """Letter -> parts, by the operands, without letters on which the operands of a piece disagree. Raises Wrong for other disagreements."""
    found: dict[str, tuple[Parts, str, InferredSharding]] = {}
    broken: set[str] = set()
    unknown: set[str] = set()
    for place, dim, letter, parts in call.operand_dims():
        if parts is None:
            unknown |= {letter}
        if parts is None or letter == ONE:
            continue
        spread, here = call.given[place], f"dim {dim} of {call.tensors[place]}"
        known, who, other = found.setdefault(letter, (parts, here, spread))
        why = ""
        if bool(known) != bool(parts) and tile(parts, call.sizes) == tile(known, call.sizes) == 1:  # size 1 against a tile of one position
            broken |= {letter}
        elif not alike(known, parts):
            why = f"{who} is [{dim_text(known)}] and {here} is [{dim_text(parts)}]: {op_name(call.node)} takes them alike"
        elif letter in call.rule.whole and tile(parts, call.sizes) == 1 and _is_split_alike(call.given, parts):
            broken |= {letter}
        elif letter in call.rule.whole and any(part.axes for part in parts):
            why = f"{here} is [{dim_text(parts)}]: {op_name(call.node)} takes it whole"
        if why and not piece and not _is_view(spread, other):
            raise Wrong(why)
        broken |= {letter} if why else set()
    broken |= {letter for letter in unknown & found.keys() if not found[letter][0]}  # a dim of size 1 against a possible tile of one
    return {letter: parts for letter, (parts, _, _) in found.items() if letter not in broken}


def _is_view(one: InferredSharding, other: InferredSharding) -> bool:
    """Whether two values are sharded alike except for the dim that a tile of one position is in, which no line declares."""
    return one is not other and one.has_all_dims and other.has_all_dims and run_of(flat(one)) == run_of(flat(other))


def _is_split_alike(given: Sequence[InferredSharding], parts: Parts) -> bool:
    """Whether a value is split as these parts are in a dim that is not known: the rule was asked about tiles, and of what may be the tiles'
    dim it saw one position."""
    runs = runs_of([parts])
    return bool(runs) and any(not one.has_all_dims and one.runs is not None and runs <= one.runs for one in given)


def _split_whole_letters(call: RuledCall) -> set[str]:
    """Letters that are split though the rule takes them whole, as a piece may: a result without one of them may be partial."""
    whole = call.rule.whole - {ONE}
    return {letter for _, _, letter, parts in call.operand_dims() if letter in whole and any(part.axes for part in parts or ())}


def _letters_without_result(rule: Rule, letters: Mapping[str, Parts]) -> list[str]:
    """Split letters that are in no result: the operator needs all of their positions on one rank."""
    kept = _letters_with_result(rule)
    return [letter for letter, parts in letters.items() if letter not in kept and any(part.axes for part in parts)]


def _letters_maybe_without_result(call: RuledCall, letters: Mapping[str, Parts]) -> list[str]:
    """Likewise letters that may be split: a tile of one position may be in any of several dims."""
    known = _letters_with_result(call.rule) | {ONE} | letters.keys()
    return [letter for at, _, letter, _ in call.operand_dims() if letter not in known and call.given[at].split_axes() != frozenset()]


def _letters_with_result(rule: Rule) -> set[str]:
    """Letters that are in a result: as a dim, summed over, by a relation or by a window."""
    kept = {letter for dims in rule.results for letter in dims} | {letter for sums in rule.sums for letter in sums}
    kept |= {letter for relation in rule.relations for letter in (*relation.inside, *relation.outside)}
    return kept | {letter for one, (other, _) in rule.windows.items() for letter in (one, other)}


def _partial_of_sums(rule: Rule, index: int, letters: Mapping[str, Parts]) -> dict[str, str] | None:
    """Axis -> reduction of result `index`, for the axes of the letters that it sums over; None if such a letter is unknown."""
    sums = rule.sums[index] if index < len(rule.sums) else {}
    owed: dict[str, str] = {}
    for letter, how in sums.items():
        if letter in letters:
            owed.update(dict.fromkeys((axis for part in letters[letter] for axis in part.axes if axis != MICROBATCH), how))
        elif any(letter in dims for dims in rule.operands):
            return None
    return owed


def _summed_axes(owing: Sequence[Mapping[str, str] | None]) -> set[str]:
    """Axes over which every result is a partial sum."""
    found = [{axis for axis, how in (owed or {}).items() if how == "sum"} for owed in owing]
    return set.intersection(*found) if found else set()


def _addend_positions(deferrals: Sequence[Deferral], count: int) -> set[int]:
    """Operands added to a product, such as a bias: they must be partial whichever factor of the product is."""
    sums = [set(deferral.positions) for deferral in deferrals if deferral.reduction == "sum"]
    return set.intersection(*sums) if len(sums) > 1 else set()


def _whole_addends(deferrals: Sequence[Deferral], given: Sequence[InferredSharding], axis: str) -> set[int]:
    """Operands that `axis` does not split and that are summed with tiles that `axis` splits, such as index_put's first, to which rows are
    added: each rank would add them once."""
    split = [spread.split_axes() for spread in given]
    sums = [deferral.positions for deferral in deferrals if deferral.reduction == "sum"]
    tiled = [positions for positions in sums if any(axis in (split[place] or ()) for place in positions)]
    return {place for positions in tiled for place in positions if (axes := split[place]) is not None and axis not in axes}


def _deferred_partial(
    call: RuledCall, deferrals: Sequence[Deferral], owing: Sequence[Mapping[str, str] | None]
) -> dict[str, str] | None:
    """Axis -> reduction that results take over from partial operands; None if unknown. Raises Wrong for a partial operand without a
    deferral. `owing`: axis -> reduction of each result by the rule's sums; operands added to a partial sum must be partial too."""
    names, given = list(map(str, call.tensors)), call.given
    if any(spread.partial is None for spread in given):
        return None
    summed, added = _summed_axes(owing), _addend_positions(deferrals, len(given))
    for axis in summed:
        for place in sorted(added | _whole_addends(deferrals, given, axis)):
            if (given[place].partial or {}).get(axis) != "sum" and not given[place].varies:
                told = f"{names[place]} is added on each rank to its part of a sum over {axis}"
                raise Wrong(f"{told}, and is no part itself: keep_first makes it one")
    waiting = {(axis, how) for spread in given for axis, how in (spread.partial or {}).items()}
    found: dict[str, str] = {}
    for axis, how in sorted(waiting):
        places = {place for place, spread in enumerate(given) if (spread.partial or {}).get(axis) == how}
        if axis in summed and all(any(place in deferral.positions for deferral in deferrals) for place in places):
            continue
        fitting = [deferral for deferral in deferrals if deferral.reduction == how and set(deferral.positions) == places]
        summing = [set(deferral.positions) for deferral in deferrals if deferral.reduction == "sum"]
        if not fitting and None in owing and how == "sum" and (places <= added or any(places < part for part in summing)):
            return None  # a rank may have one position of the letter that the product sums over: no line declares its axes then
        if not fitting:
            told = " and ".join(dict.fromkeys(names[place] for place in sorted(places)))
            rest = [name for place, name in enumerate(names) if place not in places and name not in told]
            together = any(deferral.reduction == how and places < set(deferral.positions) for deferral in deferrals) and rest
            why = f" unless {' and '.join(dict.fromkeys(rest))} is so too" if together else ""
            through = f"which {op_name(call.node)} does not let through{why}"
            raise Wrong(f"{told} is {partial_text({axis: how})}, {through}: a reduction must come first")
        if fitting[0].left:
            found[axis] = fitting[0].left
    return found


def _check_relations(call: RuledCall) -> None:
    """Raises Wrong unless both sides of each relation between dims are split at the same positions."""
    rule, given, told = call.rule, call.given, call.declared
    for relation in rule.relations:
        inside = _side(rule.operands, given, relation.inside)
        outside = _side(rule.results, told, relation.outside)
        if inside is None or outside is None:
            continue
        one, other = ([run for run in side if run[2]] for side in (inside, outside))
        if [run[1:] for run in one] != [run[1:] for run in other]:
            sides = f"{_dims_text(rule.operands, given, relation.inside)} and {_dims_text(rule.results, told, relation.outside)}"
            raise Wrong(f"{sides} hold the same elements, and are split differently")


def _side(rows: Sequence[Dims], spreads: Sequence[InferredSharding], letters: Dims) -> list[tuple[str, int, tuple[str, ...]]] | None:
    found: list[Part] = []
    for letter in letters:
        if letter.startswith("#"):
            continue
        parts = next((s.dims[d] for row, s in zip(rows, spreads, strict=False) for d, name in enumerate(row) if name == letter), None)
        if parts is None:
            return None
        found += parts
    return run_of(found)


def _dims_text(rows: Sequence[Dims], spreads: Sequence[InferredSharding], letters: Dims) -> str:
    found = [dim for row, s in zip(rows, spreads, strict=False) for name, dim in zip(row, s.dims, strict=False) if name in letters]
    return f"[{', '.join(dim_text(dim) for dim in found if dim is not None)}]"
