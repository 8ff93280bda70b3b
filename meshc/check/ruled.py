"""How the result of an operator lies, by its rule: letters that its operands and results share stand for one thing, split one way.

    mm, "m k, k n -> m n +k", of [batch 4/dp, ffn 32/tp] and [ffn 32/tp, hidden 8]      gives [batch 4/dp, hidden 8] partial(sum: tp)
    mm of [batch 4/dp, ffn 32/tp] and [ffn 32, hidden 8]                                does not go: k is split in one and not in the other
    relu of a value that is partial(sum: tp)                                            does not go: it lets no sum through

Rules are stated for whole values and are asked here for the tiles that a rank has, which the same operator makes of tiles. Where it does
not, because a rank's place has gone into the numbers, the value `varies`, and only what must hold all the same is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch.fx import Node

from meshc.check.spread import Parts, Spread, alike, flat, run_of, shown, shown_partial, tile
from meshc.check.types import Wrong
from meshc.ir import is_getitem, op_name
from meshc.ir.sharding import Part
from meshc.ir.spmd import MICROBATCH
from meshc.ir.window import Window

Dims = tuple[str, ...]
ONE = "_"


class Relation(Protocol):
    """Dims of the operand and of the result that hold the same elements in the same order (`meshc.rules.rule`)."""

    @property
    def inside(self) -> Dims: ...
    @property
    def outside(self) -> Dims: ...
    @property
    def soft(self) -> bool: ...


class Rule(Protocol):
    """What is asked of an operator's rule (`meshc.rules.rule`)."""

    @property
    def operands(self) -> tuple[Dims, ...]: ...
    @property
    def results(self) -> tuple[Dims, ...]: ...
    @property
    def sums(self) -> tuple[dict[str, str], ...]: ...
    @property
    def whole(self) -> frozenset[str]: ...
    @property
    def relations(self) -> Sequence[Relation]: ...
    @property
    def kind(self) -> str: ...
    @property
    def zigzag(self) -> frozenset[str]: ...
    @property
    def windows(self) -> Mapping[str, tuple[str, Window]]: ...
    @property
    def neutral(self) -> float: ...
    @property
    def clean(self) -> Sequence[int]: ...
    @property
    def self_masked(self) -> bool: ...


class Deferral(Protocol):
    """Operands that may come in partial together, and what their result is then partial for (`meshc.rules.partial`)."""

    @property
    def positions(self) -> tuple[int, ...]: ...
    @property
    def reduction(self) -> str: ...
    @property
    def left(self) -> str: ...


class Rules(Protocol):
    """The operators' rules, which the passes have."""

    def rule_of(self, node: Node, tensors: list[Node]) -> Rule | None: ...

    def deferrals(self, node: Node, rule: Any) -> Sequence[Deferral]: ...

    def in_any_order(self, node: Node, rule: Any, letter: str) -> bool: ...

    def only_moves(self, node: Node) -> bool: ...

    def ranges(self, node: Node, tensors: list[Node]) -> Sequence[tuple[int, int, int, int | None]]: ...


def ruled(
    node: Node,
    names: Sequence[str],
    rule: Rule,
    deferrals: Sequence[Deferral],
    given: Sequence[Spread],
    told: Sequence[Spread],
    sizes: Mapping[str, int],
) -> list[Spread]:
    """How the results lie. `names` are the operands', for messages; `told` is what the lines say of the results.

    Where one that is read says nothing an operator is a piece of what a rule makes of one, and may do with tiles what whole values do not
    allow.
    """
    piece = any(told[index].runs is None for index in _read(node))
    letters = _letters(node, names, rule, given, piece, sizes)
    lost = [] if any(not deferral.left for deferral in deferrals) else _lost(rule, letters)  # of operands that only say a shape
    if lost and not piece:
        raise Wrong(f"{op_name(node)} makes its result of all of [{shown(letters[lost[0]])}], of which a rank has a tile")
    owing = [_owed(rule, index, letters) for index in range(len(rule.results))]
    partial = _deferred(node, names, deferrals, given, owing)
    varies = any(spread.varies for spread in given) or bool(lost)
    lost += _maybe_lost(rule, letters, given)
    results, cut = [], _cut(rule, given)
    for owed, dims in zip(owing, rule.results, strict=True):
        found = tuple(letters.get(letter) for letter in dims)
        unknown = lost or partial is None or owed is None or cut - set(dims)
        result = Spread(found, None if unknown else {**(partial or {}), **(owed or {})}, varies=varies)
        moves = rule.kind == "layout" and bool(given)
        results.append(replace(result, padding=given[0].padding, filled=given[0].filled) if moves else result)
    if not piece:
        _related(rule, given, told)
    return results


def _read(node: Node) -> set[int]:
    """Which results are read; of an operator that makes one, that one."""
    read = {user.args[1] for user in node.users if is_getitem(user) and isinstance(user.args[1], int)}
    return read or {0}


def _letters(
    node: Node, names: Sequence[str], rule: Rule, given: Sequence[Spread], piece: bool, sizes: Mapping[str, int]
) -> dict[str, Parts]:
    """What each letter of the operands stands for, but for those that a piece does not keep to."""
    found: dict[str, tuple[Parts, str, Spread]] = {}
    broken: set[str] = set()
    unknown: set[str] = set()
    for name, dims, spread in zip(names, rule.operands, given, strict=True):
        for place, (letter, parts) in enumerate(zip(dims, spread.dims, strict=True)):
            if parts is None:
                unknown |= {letter}
            if parts is None or letter == ONE:
                continue
            here = f"dim {place} of {name}"
            known, who, other = found.setdefault(letter, (parts, here, spread))
            why = ""
            if bool(known) != bool(parts) and tile(parts, sizes) == tile(known, sizes) == 1:  # one position against a tile of one
                broken |= {letter}
            elif not alike(known, parts):
                why = f"{who} is [{shown(known)}] and {here} is [{shown(parts)}]: {op_name(node)} takes them alike"
            elif letter in rule.whole and any(part.axes for part in parts):
                why = f"{here} is [{shown(parts)}]: {op_name(node)} takes it whole"
            if why and not piece and not _is_view(spread, other):
                raise Wrong(why)
            broken |= {letter} if why else set()
    broken |= {letter for letter in unknown & found.keys() if not found[letter][0]}  # one position, and what may be a tile of one
    return {letter: parts for letter, (parts, _, _) in found.items() if letter not in broken}


def _is_view(one: Spread, other: Spread) -> bool:
    """Whether two values of one shape on a rank lie alike but for the dim in which a tile of one position stands: no line says which."""
    return one is not other and one.known and other.known and run_of(flat(one)) == run_of(flat(other))


def _cut(rule: Rule, given: Sequence[Spread]) -> set[str]:
    """Letters that are split though a rule takes them whole, as a piece may: what has nothing of them may be a part of a sum."""
    rows = (zip(row, spread.dims, strict=True) for row, spread in zip(rule.operands, given, strict=True))
    return {letter for row in rows for letter, parts in row if letter in rule.whole and any(part.axes for part in parts or ())}


def _lost(rule: Rule, letters: Mapping[str, Parts]) -> list[str]:
    """Letters that are split and of which no result has anything: an operator that finishes what it makes of them by itself."""
    kept = _kept(rule)
    return [letter for letter, parts in letters.items() if letter not in kept and any(part.axes for part in parts)]


def _maybe_lost(rule: Rule, letters: Mapping[str, Parts], given: Sequence[Spread]) -> list[str]:
    """Likewise letters of which nobody knows whether they are split: a tile of one position may stand in any of several dims."""
    kept = _kept(rule) | {ONE}
    dims = [(letter, spread) for row, spread in zip(rule.operands, given, strict=True) for letter in row]
    return [letter for letter, spread in dims if letter not in kept and letter not in letters and spread.split() != frozenset()]


def _kept(rule: Rule) -> set[str]:
    """Letters of which a result has something: themselves, sums over them, what holds the same elements."""
    kept = {letter for dims in rule.results for letter in dims} | {letter for sums in rule.sums for letter in sums}
    kept |= {letter for relation in rule.relations for letter in (*relation.inside, *relation.outside)}
    return kept | {letter for one, (other, _) in rule.windows.items() for letter in (one, other)}


def _owed(rule: Rule, index: int, letters: Mapping[str, Parts]) -> dict[str, str] | None:
    """What a result waits for: the axes of the letters that it sums over. None if not all are known."""
    sums = rule.sums[index] if index < len(rule.sums) else {}
    owed: dict[str, str] = {}
    for letter, how in sums.items():
        if letter in letters:
            owed.update(dict.fromkeys((axis for part in letters[letter] for axis in part.axes if axis != MICROBATCH), how))
        elif any(letter in dims for dims in rule.operands):
            return None
    return owed


def _summed(owing: Sequence[Mapping[str, str] | None]) -> set[str]:
    """Axes over which each rank makes a part of the sum that every result is."""
    found = [{axis for axis, how in (owed or {}).items() if how == "sum"} for owed in owing]
    return set.intersection(*found) if found else set()


def _added(deferrals: Sequence[Deferral], count: int) -> set[int]:
    """Operands that stand beside a product, as a bias does: they are partial whichever of its factors is."""
    sums = [set(deferral.positions) for deferral in deferrals if deferral.reduction == "sum"]
    return set.intersection(*sums) if len(sums) > 1 else set()


def _beside(deferrals: Sequence[Deferral], given: Sequence[Spread], axis: str) -> set[int]:
    """Operands that every rank has all of beside tiles that `axis` splits, both going into one sum: what rows are added to, as index_put's
    first. Each rank's part has them once."""
    split = [spread.split() for spread in given]
    sums = [deferral.positions for deferral in deferrals if deferral.reduction == "sum"]
    tiled = [positions for positions in sums if any(axis in (split[place] or ()) for place in positions)]
    return {place for positions in tiled for place in positions if (axes := split[place]) is not None and axis not in axes}


def _deferred(
    node: Node,
    names: Sequence[str],
    deferrals: Sequence[Deferral],
    given: Sequence[Spread],
    owing: Sequence[Mapping[str, str] | None],
) -> dict[str, str] | None:
    """What is still waited for because operands were partial. None if it is not known of one. `owing`: what each result is a sum of that
    ranks make: what is added to each part must be a part, too."""
    if any(spread.partial is None for spread in given):
        return None
    summed, added = _summed(owing), _added(deferrals, len(given))
    for axis in summed:
        for place in sorted(added | _beside(deferrals, given, axis)):
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
            return None  # a rank may have one position of what the product sums over, and then no line says which axis splits it
        if not fitting:
            told = " and ".join(dict.fromkeys(names[place] for place in sorted(places)))
            rest = [name for place, name in enumerate(names) if place not in places and name not in told]
            together = any(deferral.reduction == how and places < set(deferral.positions) for deferral in deferrals) and rest
            why = f" unless {' and '.join(dict.fromkeys(rest))} is so too" if together else ""
            through = f"which {op_name(node)} does not let through{why}"
            raise Wrong(f"{told} is {shown_partial({axis: how})}, {through}: a reduction must come first")
        if fitting[0].left:
            found[axis] = fitting[0].left
    return found


def _related(rule: Rule, given: Sequence[Spread], told: Sequence[Spread]) -> None:
    """Relations between dims: what is split lies in the same places on both sides."""
    for relation in rule.relations:
        inside = _side(rule.operands, given, relation.inside)
        outside = _side(rule.results, told, relation.outside)
        if inside is None or outside is None:
            continue
        one, other = ([run for run in side if run[2]] for side in (inside, outside))
        if [run[1:] for run in one] != [run[1:] for run in other]:
            sides = f"{_shown(rule.operands, given, relation.inside)} and {_shown(rule.results, told, relation.outside)}"
            raise Wrong(f"{sides} hold the same elements, and are split differently")


def _side(rows: Sequence[Dims], spreads: Sequence[Spread], letters: Dims) -> list[tuple[str, int, tuple[str, ...]]] | None:
    found: list[Part] = []
    for letter in letters:
        if letter.startswith("#"):
            continue
        parts = next((s.dims[d] for row, s in zip(rows, spreads, strict=False) for d, name in enumerate(row) if name == letter), None)
        if parts is None:
            return None
        found += parts
    return run_of(found)


def _shown(rows: Sequence[Dims], spreads: Sequence[Spread], letters: Dims) -> str:
    found = [dim for row, s in zip(rows, spreads, strict=False) for name, dim in zip(row, s.dims, strict=False) if name in letters]
    return f"[{', '.join(shown(dim) for dim in found if dim is not None)}]"
