"""Few glob patterns that match all needed names, and no name for which a line would be false (greedy set cover).

    needed   layers.0.attn.q_proj.weight, layers.0.attn.k_proj.weight, the same of layers 1 and 2
    wrong    layers.0.attn.o_proj.weight, ...
  gives
    layers.*.attn.[kq]_proj.weight

A candidate is a name, with a wildcard for its layer number if that matches nothing wrong, or two such that differ in one place, merged if
that matches nothing wrong. The pattern that matches most uncovered names comes first (greedy set cover; Chvatal, Mathematics of Operations
Research 4(3), 1979); of equal ones that with the fewest names beyond the needed ones, then with the fewest wildcards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import translate
from heapq import heapify, heappop, heappush
from itertools import combinations
from os.path import commonprefix
from typing import Any, TypeVar

from meshc.cost.divided_work import collapse_layers

Candidate = TypeVar("Candidate")


def greedy_cover(covers: Mapping[Candidate, int], needed: int, rank: Callable[[Candidate], Any]) -> list[Candidate]:
    """Few candidates that cover `needed`, as far as any do: first that which covers most of what is left, of equal ones the least by
    `rank`; without those that the others make needless. Sets are integers, bit by bit."""
    queue = [(-(cover & needed).bit_count(), rank(one), at, one) for at, (one, cover) in enumerate(covers.items()) if cover & needed]
    heapify(queue)
    left, taken = needed, list[Candidate]()
    while left and queue:
        count, order, at, one = heappop(queue)
        now = (covers[one] & left).bit_count()
        if now == -count:
            taken.append(one)
            left &= ~covers[one]
        elif now:  # some of it is covered by now
            heappush(queue, (-now, order, at, one))
    for one in list(taken):
        alone = covers[one] & needed
        for other in taken:
            alone &= alone if other is one else ~covers[other]
        if not alone:
            taken.remove(one)
    return taken


def cover_patterns(needed: Collection[str], right: Collection[str], names: Sequence[str]) -> list[str]:
    """Patterns that match all `needed` names, and no other of `names` than those in `right`; in the order of the names."""
    wanted, well = (sum(1 << at for at, name in enumerate(names) if name in some) for some in (set(needed), {*needed, *right}))
    about: dict[str, int] = {}
    forms = dict.fromkeys(form for at, name in enumerate(names) if wanted >> at & 1 for form in _forms(name, names, well, about))
    for one in _merged_patterns([*forms]):
        _is_true(one, names, well, about)
    taken = greedy_cover(about, wanted, lambda one: ((about[one] & ~wanted).bit_count(), _wildcards(one), len(one), one))
    return sorted(taken, key=lambda one: about[one] & -about[one])


def _forms(name: str, names: Sequence[str], well: int, about: dict[str, int]) -> Iterator[str]:
    """The candidate of one name: with a wildcard for its layer number, or the name itself where that matches something wrong."""
    of_layers = collapse_layers(name)
    if of_layers in about or _is_true(of_layers, names, well, about):
        yield of_layers
    else:
        _is_true(name, names, well, about)
        yield name


def _is_true(pattern: str, names: Sequence[str], well: int, about: dict[str, int]) -> bool:
    """Whether `pattern` matches names in `well` only; if so, the matches are recorded in `about`."""
    if pattern not in about:
        match = re.compile(translate(pattern)).match
        found = sum(1 << at for at, name in enumerate(names) if match(name))
        if found & ~well:
            return False
        about[pattern] = found
    return True


def _merged_patterns(forms: Sequence[str]) -> Iterator[str]:
    """Patterns for two or more forms that differ in one place."""
    letters: dict[tuple[str, str], dict[str, None]] = {}
    found: dict[str, None] = {}
    for one, other in combinations(forms, 2):
        front = commonprefix([one, other])
        back = commonprefix([one[len(front) :][::-1], other[len(front) :][::-1]])[::-1]
        rest = [text[len(front) : len(text) - len(back)] for text in (one, other)]
        number = front[-1:] in ("", ".") and back[:1] in ("", ".")  # a layer number: `*` or single names stand for these
        if all(len(text) == 1 and text.isalnum() for text in rest) and not number:
            letters.setdefault((front, back), {}).update(dict.fromkeys(rest))
        head, tail = front[: _end_of_words(front)], back[len(back) - _end_of_words(back[::-1]) :]
        found[f"{head}*{tail}"] = None
    yield from (f"{front}[{''.join(sorted(each))}]{back}" for (front, back), each in letters.items())
    yield from found


def _end_of_words(text: str) -> int:
    """Length of the part of a text up to its last separator, included."""
    return max(text.rfind("."), text.rfind("_")) + 1


def _wildcards(pattern: str) -> int:
    return len(re.findall(r"[*?\[]", pattern))
