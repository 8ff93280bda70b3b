"""Shardings of an operator's results, by its rule and the shardings of its operands; or why an operator may not run on such tiles.

    mm, "m k, k n -> m n +k", of [batch 4/dp, ffn 32/tp] and [ffn 32/tp, hidden 8]      gives [batch 4/dp, hidden 8] partial(sum: tp)
    mm of [batch 4/dp, ffn 32/tp] and [ffn 32, hidden 8]                                k is split in one operand and not in the other
    relu of a value that is partial(sum: tp)                                            relu does not commute with a sum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from meshc.ir.sharding import Part, Sharding
from meshc.rules.operator import Deferral
from meshc.rules.partial import deferrals
from meshc.rules.rule import ONE, Dims, Rule

Parts = tuple[Part, ...]


class SplitError(ValueError):
    """Why an operator may not run on such tiles."""


def parts_of_letters(rule: Rule, operands: Sequence[Sharding], results: Sequence[Sharding | None]) -> dict[str, Parts]:
    """The parts of each letter: by the operands, and of letters that only results have by these. Raises SplitError.

    Parts of size 1 that nothing splits are left out. `results`: as they are declared; None where nobody knows.
    """
    found: dict[str, Parts] = {}
    passing = {ring.letter: ring for ring in rule.rings.values()}
    for rows, shardings, of in ((rule.operands, operands, "operand"), (rule.results, results, "result")):
        before = dict(found)
        for at, (letters, sharding) in enumerate(zip(rows, shardings, strict=True)):
            if sharding is None:
                continue
            if len(letters) != len(sharding.dims):
                raise SplitError(f"{of} {at} has {len(sharding.dims)} dims, the rule {len(letters)}")
            for dim, letter in enumerate(letters):
                parts = tuple(part for part in sharding.dims[dim] if part.size != 1 or part.axes)
                if of == "result" and letter in before:
                    continue
                if letter == ONE:
                    if any(part.axes for part in parts):
                        raise SplitError(f"dim {dim} of {of} {at} is split, and has one position for all")
                    continue
                if letter in passing and at not in passing[letter].operands:
                    if any(part.axes for part in parts):
                        raise SplitError(f"dim {dim} of {of} {at} is {_text(parts)}, and each rank reads the part of another's block")
                    continue
                known = found.setdefault(letter, parts)
                if not _is_alike(known, parts):
                    raise SplitError(f"dim {dim} of {of} {at} is {_text(parts)}, and another of {letter} is {_text(known)}")
                if sum(len(part.axes) for part in parts) and len(parts) > len(known):
                    found[letter] = parts
    for letter, parts in found.items():
        if letter in rule.whole and letter not in passing and any(part.axes for part in parts):
            raise SplitError(f"{letter} is {_text(parts)}, and the operator takes it whole")
    return found


def result_shardings(
    node: Node, rule: Rule, operands: Sequence[Sharding], parts: Mapping[str, Parts], results: Sequence[Sharding | None]
) -> list[Sharding]:
    """The sharding of each result, its partial reductions included. Raises SplitError.

    `parts`: of the letters (`parts_of_letters`). `results`: as declared, for dims that a relation ties to others than letters say.
    """
    _check_ties(rule, operands, parts, results)
    allowed = deferrals(node, rule)
    found = []
    for index, letters in enumerate(rule.results):
        sums = rule.sums[index] if index < len(rule.sums) else {}
        home = {  # blocks have passed round all ranks, and their sums have returned
            letter for letter, ring in rule.rings.items() if index in ring.results and any(part.axes for part in parts.get(ring.letter, ()))
        }
        summed = {letter: how for letter, how in sums.items() if letter not in home}
        owed = {axis: how for letter, how in summed.items() for part in parts.get(letter, ()) for axis in part.axes}
        partial = {**_passed_on(rule, operands, allowed, owed), **owed}
        whole = {ring.letter for ring in rule.rings.values() if index not in ring.results}  # each rank has what it makes of all blocks
        dims = (_unsplit(parts.get(letter, ())) if letter in whole else parts.get(letter, ()) for letter in letters)
        found.append(Sharding(tuple(dims), tuple(partial.items())))
    return found


def _unsplit(parts: Parts) -> Parts:
    return tuple(replace(part, axes=(), order="") for part in parts)


def _check_ties(rule: Rule, operands: Sequence[Sharding], parts: Mapping[str, Parts], results: Sequence[Sharding | None]) -> None:
    """Raises SplitError where letters that belong together are split differently: those of a window, of a ring, of a relation."""

    def axes(letter: str) -> tuple[str, ...]:
        return tuple(axis for part in parts.get(letter, ()) for axis in part.axes)

    for letter, (other, _) in rule.windows.items():
        if axes(letter) != axes(other):
            raise SplitError(f"{letter} is split over {axes(letter)} and its windows over {axes(other)}")
    for letter, ring in rule.rings.items():
        if axes(ring.letter) and axes(letter) != axes(ring.letter) and not (ring.apart and not axes(letter)):
            raise SplitError(f"{letter} is split over {axes(letter)}, and the blocks that pass it over {axes(ring.letter)}")
    rows, shardings = (*rule.operands, *rule.results), (*operands, *results)
    for relation in rule.relations:  # of an operand and a result, or of two operands: values, and their scales
        inside, outside = (_side(rows, shardings, side) for side in (relation.inside, relation.outside))
        if inside is not None and outside is not None and inside != outside:
            raise SplitError(f"{inside} and {outside} hold the same elements, and are split differently")


def _side(rows: Sequence[Dims], shardings: Sequence[Sharding | None], letters: Dims) -> list[tuple[int, tuple[str, ...]]] | None:
    """The split parts of one side of a relation, with sizes; None where nobody knows."""
    found: list[Part] = []
    for letter in letters:
        if not letter.startswith("#"):
            pairs = ((row.index(letter), one) for row, one in zip(rows, shardings, strict=True) if letter in row)
            dim, sharding = next(pairs, (0, None))
            if sharding is None:
                return None
            found += sharding.dims[dim]
    return [run for run in runs_of(tuple(found)) if run[1]]


def _passed_on(rule: Rule, operands: Sequence[Sharding], allowed: Sequence[Deferral], owed: Mapping[str, str]) -> dict[str, str]:
    """Axis -> reduction that a result takes over from operands that are partial. `owed`: what it is partial over by its own sums."""
    summed = {axis for axis, how in owed.items() if how == "sum"}
    sums = [set(one.positions) for one in allowed if one.reduction == "sum"]
    added = set.intersection(*sums) if len(sums) > 1 else set()
    for axis in summed:
        for place in added:
            if place not in rule.once and dict(operands[place].partial).get(axis) != "sum":
                raise SplitError(f"operand {place} is added on each rank to its part of a sum over {axis}, and is no part itself")
    found: dict[str, str] = {}
    for axis, how in {row: None for one in operands for row in one.partial}:
        places = {place for place, one in enumerate(operands) if (axis, how) in one.partial}
        if axis in summed and all(any(place in positions for positions in sums) for place in places):
            continue
        fitting = [one for one in allowed if one.reduction == how and set(one.positions) == places]
        if not fitting:
            raise SplitError(f"operands {sorted(places)} are partial({how}: {axis}), which the operator does not let through")
        if fitting[0].left:
            found[axis] = fitting[0].left
    return found


def _is_alike(one: Parts, other: Parts) -> bool:
    """Whether two are split alike: unsplit neighbours count as one part."""
    return runs_of(one) == runs_of(other)


def runs_of(parts: Parts) -> list[tuple[int, tuple[str, ...]]]:
    """The order of a dim's elements on ranks: size and axes of each part, unsplit neighbours as one, without parts of size 1."""
    found: list[tuple[int, tuple[str, ...]]] = []
    for part in parts:
        if part.size == 1 and not part.axes:
            continue
        if not part.axes and found and not found[-1][1]:
            found[-1] = (found[-1][0] * part.size, ())
        else:
            found.append((part.size, part.cuts))
    return found


def _text(parts: Parts) -> str:
    return " * ".join(map(str, parts)) or "1"
