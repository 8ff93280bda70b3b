"""Messages restarted from the dual values of a linear program, where sweeps have stalled.

    sweep              ___----''''          each class by itself: it stalls where several would have to move together
    linear program             |           over the pairs that cost least, its charges no farther from the messages than so far
    messages                   |           where they charge more than a pair that it did not know has room for, that is taken back
    sweep                      ___---''    and so on

A program's rows charge a leg for each form that is given and for each that is wanted, as messages do: over all pairs these are messages of
the highest bound that there is. Over some of them it knows nothing of the others, and would lead anywhere; so its charges stay near the
messages, and what it promises is a bound somewhat lower (the boxstep method: Marsten, Hogan, Blankenship, Operations Research 23(3), 1975).
The pairs that were in the way are among those that cost least afterwards, and the next program knows them (column generation).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshc.passes.planner.dual_ascent import DualAscent, Edge
from meshc.passes.planner.relaxation import Charges
from meshc.passes.planner.search_space import Floats, Numbers


def charges(ascent: DualAscent) -> dict[tuple[int, int], Charges]:
    """What its legs charge, by group and leg."""
    found: dict[tuple[int, int], Charges] = {}
    for edge in ascent.edges:
        found[edge.group, edge.leg] = Charges(edge.maker.forms, edge.maker.message, edge.reader.forms, edge.reader.message)
    return found


def guide_messages(ascent: DualAscent, said: Mapping[tuple[int, int], Charges]) -> DualAscent:
    """Messages over the options of an ascent that charge what a linear program over some of them says, by group and leg."""
    found = ascent.without_messages()
    for edge, was in zip(found.edges, ascent.edges, strict=True):
        _charge(found, edge, was, said.get((edge.group, edge.leg)))
    for edge, was in zip(found.edges, ascent.edges, strict=True):
        _fill(found, edge, was)
    found.settle()
    return found


def _charge(found: DualAscent, edge: Edge, was: Edge, charges: Charges | None) -> None:
    """What the program says of the forms that it knows, the reader's as far as there is room; of others nothing is taken yet."""
    if charges is None:
        edge.maker.message, edge.reader.message = was.maker.message, was.reader.message
    else:
        edge.maker.message = _charges_by_form(edge.maker.forms, charges.given, charges.maker)
        edge.reader.message = _charges_by_form(edge.reader.forms, charges.wanted, charges.reader)
    edge.reader.message = np.minimum(edge.reader.message, (found.room(edge) - edge.maker.message[:, None]).min(axis=0))
    found.take(edge)


def _fill(found: DualAscent, edge: Edge, was: Edge) -> None:
    """Forms that the program does not know keep what they were charged as far as there is room."""
    unknown = np.isinf(edge.maker.message)
    if unknown.any():
        left = np.minimum(was.maker.message, (found.room(edge) - edge.reader.message).min(axis=1))
        edge.maker.message = np.where(unknown, left, edge.maker.message)
        found.take(edge)
    unknown = np.isinf(edge.reader.message)
    if unknown.any():
        left = np.minimum(was.reader.message, (found.room(edge) - edge.maker.message[:, None]).min(axis=0))
        edge.reader.message = np.where(unknown, left, edge.reader.message)
        found.take(edge)


def _charges_by_form(forms: Numbers, known: Numbers, charged: Floats) -> Floats:
    """By form; of one that is not known, less than anything."""
    place = np.minimum(np.searchsorted(known, forms), len(known) - 1)
    return np.where(known[place] == forms, charged[place], -np.inf)
