"""Explanations of decisions for a parameter, operator or program line, as JSON data and as text.

    layers.3.mlp.up_proj.weight
      stored     [ffn 14336/tp, hidden 4096/dp], as its gradient; its state [ffn 14336/tp, hidden 4096/dp]
      read by    mm of layers.3.mlp.up_proj, forward       all_gather over dp, 58.7 MB        0.21 ms
                 mm of layers.3.mlp.up_proj, backward      all_gather over dp, 58.7 MB        0.21 ms
      else       [ffn 14336/tp, hidden 4096]               + 3.10 ms
                   + 3.40 ms  all_reduce over dp of mm of layers.3.mlp.up_proj, backward
                   - 0.30 ms  all_gather over dp of layers.3.mlp.up_proj.weight
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypedDict

from meshc.report.tables import bytes_text

SHOWN: Final = 3
"""Largest number of operators of a module; in the text, of cost terms of an alternative."""


class Fall(TypedDict):
    """A term of the cost, and its increase in seconds."""

    what: str
    more_s: float


class Alternative(TypedDict):
    """An alternative to a decision: seconds that a call takes more, bytes that a rank holds, and the terms of the cost that differ."""

    option: str
    more_s: float
    holds_bytes: int
    falls: list[Fall]


class ParameterReader(TypedDict):
    """A reader of a parameter, the collectives before it (or that there are none), the bytes of their result, and their seconds."""

    reader: str
    move: str
    bytes: int
    seconds: float


class Change(TypedDict):
    """A reshard of an operator's result for readers that need another sharding."""

    readers: list[str]
    move: str
    seconds: float


class OperatorChoice(TypedDict):
    """An operator: the factors that axes split there, its own seconds, and the number of equal ones. `others` is None without a search."""

    operator: str
    splits: str
    seconds: float
    alike: int
    changes: list[Change]
    others: list[Alternative] | None


class ParameterStorage(TypedDict):
    """A parameter: shardings of its value, gradient and state, and their DTensor placements. `others`: the alternatives to each decided
    sharding; None without a search."""

    sharding: dict[str, str]
    placements: dict[str, str]
    alike: int
    readers: list[ParameterReader]
    others: dict[str, list[Alternative]] | None


class ProgramLine(TypedDict):
    """A line of the program."""

    operator: str
    lies: str
    source: str
    code: str
    reason: str


class PlanAlternative(TypedDict):
    """A plan line that would change the decision, and the result of adding it."""

    line: str
    what: str


class RetainedValue(TypedDict):
    """A forward value, and how backward obtains it.

    fate     "kept", "recomputed", "on the host", "in chunks", "not read by backward";  why  the origin of that decision
    waits_s  seconds computed between its last reader in forward and its first in backward
    at_peak_bytes  bytes of the value and its copies at the memory peak
    again    operators and collectives that recompute it;  recompute_s  their seconds
    """

    value: str
    operator: str
    lies: str
    module: str
    source: str
    bytes: int
    at_peak_bytes: int
    fate: str
    why: str
    waits_s: float
    again: list[str]
    recompute_s: float
    instead: list[PlanAlternative]


class Explanation(TypedDict):
    """An explanation. A forward value has `remembered`; a parameter `stored`; a module `operators`, its slowest ones, and the number of
    further ones; a program line `line` and the operator that computes it."""

    name: str
    searched: bool
    stored: ParameterStorage | None
    line: ProgramLine | None
    operators: list[OperatorChoice]
    further: int
    remembered: list[RetainedValue]


def text(found: Explanation) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Explanation) -> Iterator[str]:
    line, stored = found["line"], found["stored"]
    if line is None:
        yield found["name"]
    else:
        yield f"{found['name']}, {line['operator']}{line['lies'] and ': '}{line['lies']}"
        if line["source"]:
            yield f"  {line['source']}{line['code'] and ': '}{line['code']}"
        if line["reason"]:
            yield f"  {line['reason']}"
    if stored is not None:
        yield from _of_parameter(stored)
    for chosen in found["operators"]:
        yield from _of_operator(chosen)
    if found["further"]:
        yield f"  and {found['further']} operators that take less time"
    for one in found["remembered"]:
        yield from _of_value(one)
    if not found["searched"] and (stored is not None or found["operators"]):
        yield '  its plan was given, not searched for: with plan="auto" the best alternatives stand here'


def _of_value(one: RetainedValue) -> Iterator[str]:
    yield f"  {one['value']}, {one['operator']}: {one['lies']}, {bytes_text(one['bytes'])} on a rank"
    yield f"    {'made at':<10} {one['source']}"
    yield f"    {'backward':<10} {one['fate']}: {one['why']}"
    there = f"{bytes_text(one['at_peak_bytes'])} of it" if one["at_peak_bytes"] else "nothing of it"
    yield f"    {'waits':<10} while {_ms(one['waits_s'])} are computed; at the peak {there} is there"
    yield f"    {'again':<10} {', '.join(one['again'])}: {_ms(one['recompute_s'])}"
    head = "else"
    for other in one["instead"]:
        yield f"    {head:<10} {other['line']}: {other['what']}"
        head = ""


def _with_others(by_kind: dict[str, str]) -> str:
    """The parameter's entry, and those of its gradient and state that differ."""
    own = by_kind["parameter"]
    return "; ".join([own, *(f"its {kind} {said}" for kind, said in by_kind.items() if kind != "parameter" and said != own)])


def _of_parameter(stored: ParameterStorage) -> Iterator[str]:
    yield f"  stored     {_with_others(stored['sharding'])}{_alike(stored['alike'])}"
    yield f"  placements {_with_others(stored['placements'])}"
    head = "read by"
    for reader in stored["readers"]:
        moved = f", {bytes_text(reader['bytes'])}, {_ms(reader['seconds'])}" if reader["seconds"] else ""
        yield f"  {head:<10} {reader['reader']:<44} {reader['move']}{moved}"
        head = ""
    for kind, found in (stored["others"] or {}).items():
        yield from _else("else" if kind == "parameter" else f"its {kind}", found)


def _of_operator(chosen: OperatorChoice) -> Iterator[str]:
    yield f"  {chosen['operator']}: {chosen['splits']}; {_ms(chosen['seconds'])}{_alike(chosen['alike'])}"
    for change in chosen["changes"]:
        yield f"    for {' and '.join(change['readers'])}: {change['move']}, {_ms(change['seconds'])}"
    if chosen["others"] is not None:
        yield from (f"  {line}" for line in _else("else", chosen["others"]))


def _else(head: str, others: list[Alternative]) -> Iterator[str]:
    if not others:
        yield f"  {head:<10} nothing: this is the one way that is legal here"
    for other in others:
        yield f"  {head:<10} {other['option']:<44} {_signed_text(other['more_s'])}, a rank holds {bytes_text(other['holds_bytes'])}"
        for fall in other["falls"][:SHOWN]:
            yield f"               {_signed_text(fall['more_s']):>12}  {fall['what']}"
        head = ""
    if any(other["more_s"] < 0 for other in others):
        yield f"  {'':<10} less by the planner's model, which adds all seconds up; by the clock what is taken is faster"


def _alike(count: int) -> str:
    return f" (and {count} more alike)" if count else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _signed_text(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'} {_ms(abs(seconds))}"
