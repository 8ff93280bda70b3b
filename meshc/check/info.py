"""Faults of the entries that a saved program has beside its text (`PlainProgram.info`): those that readers cannot take are refused.

    {"seed": 0, "numbers": {"0.lr": 0.1}, "fresh": {"w/exp_avg": 0.0, "w/slow": null}, ...}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, TypeGuard

from meshc.ir import bounds
from meshc.optimizer.spec import KEPT, RELATIONS
from meshc.plan.precision_lines import MOST_IN_GROUP

MOST_DIMS: Final = 64
"""Of a tensor of torch."""


def faults_of_info(info: Mapping[str, object], axes: Collection[str]) -> Iterator[str]:
    """A message for every entry of a wrong kind; `axes` are the mesh axes of more than one rank. Other entries may be anything."""
    work = info.get("work")
    for row in work if isinstance(work, list) and all(map(_is_row, work)) else ():
        if not set(axes) <= row[4].keys():
            yield f"info: a row of work is of {row[0][:80]!r} and says nothing of the axes {', '.join(axes)}"
            break
    for name, (fits, what) in _ENTRIES.items():
        if name in info and not fits(info[name]):
            yield f"info: {name} is {str(info[name])[:80]!r}, not {what}"


def _is_integer(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 64


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float) or isinstance(value, int) and abs(value) < 1 << 1023


def _is_amount(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1e300


def _is_row(value: object) -> bool:
    """Whether `value` is a row that `meshc.cost.divided_work.Work.plain` writes."""
    if not isinstance(value, list) or len(value) != 5:
        return False
    *words, flops, by_axis = value
    return all(map(_is_text, words)) and _is_amount(flops) and _by_name(_is_text)(by_axis)


def _is_guard(value: object) -> bool:
    """Whether `value` is a guard's row: group, name of the group's number, relation, constant that the number is compared with."""
    if not isinstance(value, list) or len(value) != 4:
        return False
    group, name, relation, constant = value
    return type(group) is int and _is_text(name) and relation in ("is", *RELATIONS) and _is_number(constant)


def _is_group(value: object) -> bool:
    """Whether `value` is n, m and the dim of a weight's groups."""
    if not isinstance(value, list) or len(value) != 3 or not all(type(each) is int for each in value):
        return False
    n, m, dim = value
    return 0 < n < m <= MOST_IN_GROUP and 0 <= dim < MOST_DIMS


def _are(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _by_name(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(kind(item) for item in value.values())


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_ENTRIES: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "seed": (_is_integer, "an integer of 64 bits"),
    "inputs": (lambda value: value in ("global", "local"), "global or local"),
    "outputs": (lambda value: value in ("plain", "dtensor"), "plain or dtensor"),
    "numbers": (_by_name(_is_number), "numbers by name"),
    "guards": (_are(_is_guard), "rows of a group's number, a name, a relation and a number"),
    "fresh": (_by_name(lambda value: value is None or _is_number(value)), "numbers, or null, by name"),
    "schedule": (lambda value: value is None or _is_text(value), "a schedule's name"),
    "stages_per_rank": (lambda value: type(value) is int and 0 < value <= bounds.MOST_STAGES, "a number of stages"),
    "pp_splits": (lambda value: value is None or _are(_is_text)(value), "modules' names"),
    "optimizer_state": (lambda value: value is None or value in KEPT, f"one of {', '.join(KEPT)}"),
    "master_weights": (lambda value: type(value) is bool, "true or false"),
    "keep_gradients": (lambda value: type(value) is bool, "true or false"),
    "accumulate": (lambda value: type(value) is bool, "true or false"),
    "experts": (_by_name(lambda value: _is_number(value) or _is_text(value)), "numbers and words by name"),
    "output_paths": (_are(_is_text), "a list of paths"),
    "sparse": (_by_name(_is_group), "n, m and a dim, by parameter"),
    "work": (_are(_is_row), "rows of a module, an operator, a phase, its arithmetic, and what each axis does of it"),
}
