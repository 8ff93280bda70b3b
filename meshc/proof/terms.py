"""TermTable: what values are, as numbers. Equal numbers mean equal values; a term is a call of an operator on terms.

    mm(x, w)        ("call", aten.mm.default, x's tiles, w's tiles)          the same for the traced graph and on ranks
    a + b + c       ("sum", the three, in any order)                         floating-point sums up to their order

What only moves positions is in the tiles of an operand (`tiles.py`), and makes no term.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import torch
from torch.fx import Node

from meshc.ir import comparison_key
from meshc.proof.held import Integer, JoinedValues
from meshc.proof.tiles import Tiles

Term = tuple[Any, ...]


class TermTable:
    """Numbers of terms."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._terms: list[Term] = []

    def number(self, *term: Any) -> int:
        found = self._numbers.get(term)
        if found is None:
            found = self._numbers[term] = len(self._terms)
            self._terms.append(term)
        return found

    def term(self, number: int) -> Term:
        return self._terms[number]

    def operands(self, number: int, target: object) -> list[Tiles]:
        """The operands of a call of `target`, or of one of whose results the term is; none of another term."""
        term = self._terms[number]
        term = self._terms[term[1]] if term[0] == "item" else term
        return list(_tiles_of(term)) if term[:2] == ("call", target) else []

    def varies_along(self, x: Tiles, axes: Collection[str], known: Collection[int]) -> bool:
        """Whether ranks elsewhere along axes have other elements, or might: whether anything that made it says a place there."""
        seen, work = set[int](), [x]
        while work:
            one = work.pop()
            if {axis.partition("~")[0] for axis, _ in (*one.axes, *one.partial)} & {*axes}:
                return True
            if one.root not in seen and one.root not in known:
                seen.add(one.root)
                term = self._terms[one.root]
                term = self._terms[term[1]] if term[0] == "item" else term
                if any(_names_axis(argument, axes) for argument in term):
                    return True
                work += _tiles_of(term)
        return False

    def tiles_in(self, number: int, stop: Callable[[int], bool]) -> Iterator[Tiles]:
        """The tiles that a term is made of, but for those inside of terms for which `stop`, nearest first."""
        seen, work = {number}, [number]
        while work:
            term = self._terms[work.pop(0)]
            for tiles in _tiles_of(self._terms[term[1]] if term[0] == "item" else term):
                yield tiles
                if tiles.root not in seen and not stop(tiles.root):
                    seen.add(tiles.root)
                    work.append(tiles.root)


def _tiles_of(argument: object) -> Iterator[Tiles]:
    if isinstance(argument, Tiles):
        yield argument
    elif isinstance(argument, tuple | JoinedValues):
        for item in argument if isinstance(argument, tuple) else argument.pieces:
            yield from _tiles_of(item)


def _names_axis(argument: object, axes: Collection[str]) -> bool:
    if isinstance(argument, Integer):
        return any(_names_axis(one, axes) for one in argument.made)
    return any(_names_axis(one, axes) for one in argument) if isinstance(argument, tuple) else argument in axes


def constant(argument: object) -> object:
    """A constant of a call as a part of its term."""
    if isinstance(argument, torch.device):
        return "device", argument.type
    if isinstance(argument, torch.dtype | torch.layout | torch.memory_format):
        return str(argument)
    return comparison_key(argument)


def call_term(target: object, *args: object) -> Term:
    """A call of an operator on these positional arguments as a term."""
    return "call", target, ("list", *(one if isinstance(one, Tiles) else constant(one) for one in args)), ("named",)


def arguments(args: object, leaf: Callable[[Node], object]) -> object:
    """The arguments of a call as a part of its term; `leaf` gives what stands for an operand."""
    if isinstance(args, Node):
        return leaf(args)
    if isinstance(args, list | tuple):
        return "list", *(arguments(item, leaf) for item in args)
    if isinstance(args, dict):
        return "named", *((name, arguments(args[name], leaf)) for name in sorted(args))
    return constant(args)
