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
from collections.abc import Collection, Iterator, Sequence
from fnmatch import translate
from itertools import combinations
from os.path import commonprefix

from meshc.cost.divided_work import collapse_layers


def cover_patterns(needed: Collection[str], right: Collection[str], names: Sequence[str]) -> list[str]:
    """Patterns that match all `needed` names, and no other of `names` than those in `right`; in the order of the names."""
    wanted, well = set(needed), {*needed, *right}
    about: dict[str, frozenset[str]] = {}
    forms = dict.fromkeys(form for name in names if name in wanted for form in _forms(name, names, well, about))
    for one in _merged_patterns([*forms]):
        _is_true(one, names, well, about)
    left, taken = set(wanted), list[str]()
    while left:
        best = min(about, key=lambda one: (-len(about[one] & left), len(about[one] - wanted), _wildcards(one), len(one), one))
        taken.append(best)
        left -= about[best]
    for one in list(taken):
        if wanted <= set().union(*(about[other] for other in taken if other != one)):
            taken.remove(one)
    place = {name: at for at, name in enumerate(names)}
    return sorted(taken, key=lambda one: min(place[name] for name in about[one]))


def _forms(name: str, names: Sequence[str], well: set[str], about: dict[str, frozenset[str]]) -> Iterator[str]:
    """The candidate of one name: with a wildcard for its layer number, or the name itself where that matches something wrong."""
    of_layers = collapse_layers(name)
    if of_layers in about or _is_true(of_layers, names, well, about):
        yield of_layers
    else:
        _is_true(name, names, well, about)
        yield name


def _is_true(pattern: str, names: Sequence[str], well: set[str], about: dict[str, frozenset[str]]) -> bool:
    """Whether `pattern` matches names in `well` only; if so, the matches are recorded in `about`."""
    if pattern not in about:
        found = frozenset(filter(re.compile(translate(pattern)).match, names))
        if not found <= well:
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
