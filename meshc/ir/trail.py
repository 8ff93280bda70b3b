"""Trail: a recorded trace of the arithmetic and comparisons on a program's sizes, which can be replayed at other sizes.

    n = trail.number(6144)                      6144, wherever a pass computes with it
    held = 4 * n + 1024                         25600, with the step that computed it
    if held > budget: ...                       recorded: at other sizes the comparison must have the same outcome
    trail.at([7168])                            every number at this size. TrailMismatch if any comparison has another outcome

Integers and floats are recomputed by the same operators in the same order, so they equal what the passes would have computed, to the bit,
and so do all decisions. `meshc/ir/sizes.py` is for sizes that are unknown at compile time, and decides for all of them.

A followed number is an int or a float for `isinstance`, but not for the interpreter: whatever needs the plain value (an index, a text,
numpy) converts it, which records that the number must be the same at other sizes. Functions of several numbers go through `largest` and
`smallest` (a number), `compute_tracked` (a number, by any function) and `answer` (a decision, by any function).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, TypeVar

Number = int | float
"""Plain, or followed."""
Answer = TypeVar("Answer")


class TrailMismatch(Exception):
    """At other sizes a recorded comparison has another outcome, so passes would decide otherwise, or may."""


class Trail:
    """The recorded steps and comparisons.

    values    value of each step at the sizes that passes have seen: an open number, a plain one, or computed from earlier ones
    opened    steps of the open numbers
    made      (step, function, operands) of the computed steps
    asked     (function, operands) -> answer
    hashed    steps that were hashed: numbers that differ there must differ at other sizes too
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.opened: list[int] = []
        self.made: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        self.asked: dict[tuple[Callable[..., Any], tuple[int, ...]], Any] = {}
        self.hashed: dict[int, None] = {}
        self._plain: dict[object, int] = {}
        self._known: dict[tuple[Callable[..., Any], tuple[int, ...]], Any] = {}

    def number(self, value: Number) -> Any:
        """A new open number, which is `value` for the passes; `at` takes values in the order of these calls."""
        self.opened.append(len(self.values))
        return self._add_step(value)

    def _add_step(self, value: Number) -> Any:
        self.values.append(value)
        return (TrackedFloat if type(value) is float else TrackedInteger)(self, len(self.values) - 1, value)

    def step(self, function: Callable[..., Any], *operands: Any) -> Any:
        """The result of a pure function as a followed number; recorded once for equal operands."""
        places = tuple(map(self._place, operands))
        found = self._known.get((function, places))
        if found is None:
            made = function(*[self.values[place] for place in places])
            found = self._known[function, places] = self._add_step(made)
            self.made.append((found.place, function, places))
        return found

    def ask(self, function: Callable[..., Answer], *operands: Any) -> Answer:
        """The answer of a pure function; recorded, since it must be the same at other sizes."""
        places = tuple(map(self._place, operands))
        if (function, places) not in self.asked:
            self.asked[function, places] = function(*[self.values[place] for place in places])
        return self.asked[function, places]

    def _place(self, operand: Any) -> int:
        if type(operand) in FOLLOWED:
            assert operand.trail is self, "a number of another trail"
            return operand.place
        key = (type(operand), operand) if operand else repr(operand)  # 0.0 and -0.0 apart
        place = self._plain.get(key)
        if place is None:
            place = self._plain[key] = len(self.values)
            self.values.append(operand)
        return place

    def at(self, values: Sequence[Number], plain: Collection[Number] = ()) -> list[Any]:
        """The values of all steps when the open numbers are `values`, in order. `plain`: numbers that are not open. Raises
        TrailMismatch."""
        found = list(self.values)
        for place, value in zip(self.opened, values, strict=True):
            found[place] = value
        try:
            for place, function, operands in self.made:
                if len(operands) == 2:  # nearly all
                    found[place] = function(found[operands[0]], found[operands[1]])
                else:
                    found[place] = function(*[found[operand] for operand in operands])
            for (function, operands), answer in self.asked.items():
                if function(*[found[operand] for operand in operands]) != answer:
                    said = ", ".join(f"{self.values[operand]}, now {found[operand]}" for operand in operands[:2])
                    raise TrailMismatch(f"{getattr(function, '__name__', 'a function')} has another answer: {said}")
        except ArithmeticError as error:
            raise TrailMismatch(str(error)) from error
        self._refuse_new_equals(found, plain)
        return found

    def _refuse_new_equals(self, found: Sequence[Any], plain: Collection[Number]) -> None:
        """Raises TrailMismatch if two hashed numbers that differed are equal now: unequal hashes were never compared, so nothing recorded
        it."""
        was: dict[Any, Any] = {}
        for place in self.hashed:
            before, now = self.values[place], found[place]
            if was.setdefault(now, before) != before or (now in plain and before != now):
                raise TrailMismatch(f"{now} and {was[now]} were two numbers, and are one")


class _TrackedNumber:
    """A number whose arithmetic and comparisons are recorded in its trail: the methods of these are set below, from tables."""

    __slots__ = ("place", "trail", "value")

    def __init__(self, trail: Trail, place: int, value: Number) -> None:
        self.trail, self.place, self.value = trail, place, value

    def __hash__(self) -> int:
        self.trail.hashed[self.place] = None
        return hash(self.value)

    def __bool__(self) -> bool:
        return self.trail.ask(bool, self)

    def _plain(self) -> Any:
        """The plain value; recorded, since it must be the same at other sizes."""
        self.trail.ask(operator.eq, self, self.value)
        return self.value

    def __int__(self) -> int:
        return int(self._plain())

    def __float__(self) -> float:
        return float(self._plain())

    def __str__(self) -> str:
        return str(self._plain())

    def __repr__(self) -> str:
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self.value), (self._plain(),)

    def __round__(self, digits: int | None = None) -> Any:
        return self.trail.step(round, self) if digits is None else round(self._plain(), digits)


class TrackedInteger(_TrackedNumber):
    """A followed integer."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def __index__(self) -> int:
        return int(self._plain())


class TrackedFloat(_TrackedNumber):
    """A followed float."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float


FOLLOWED: Final = (TrackedInteger, TrackedFloat)
"""Types of followed numbers, by `type`: to `isinstance` they are plain."""


def _set_comparison(name: str, of_itself: bool) -> None:
    """Sets a comparison, whose outcome between a number and itself is `of_itself`, unless that is NaN."""
    function = getattr(operator, name)

    def compare(self: _TrackedNumber, other: Any) -> Any:
        if type(other) in FOLLOWED and other.place == self.place and self.value == self.value:
            return of_itself
        return self.trail.ask(function, self, other) if isinstance(other, int | float) else NotImplemented

    setattr(_TrackedNumber, f"__{name}__", compare)


def _set_function(name: str, function: Any) -> None:
    setattr(_TrackedNumber, f"__{name}__", lambda self: self.trail.step(function, self))


def _set_operator(name: str, function: Callable[[Any, Any], Any]) -> None:
    def apply_left(self: _TrackedNumber, other: Any) -> Any:
        return self.trail.step(function, self, other) if isinstance(other, int | float) else NotImplemented

    def apply_right(self: _TrackedNumber, other: Any) -> Any:
        return self.trail.step(function, other, self) if isinstance(other, int | float) else NotImplemented

    setattr(_TrackedNumber, f"__{name}__", apply_left)
    setattr(_TrackedNumber, f"__r{name}__", apply_right)


for _name, _of_itself in {"eq": True, "ne": False, "lt": False, "le": True, "gt": False, "ge": True}.items():
    _set_comparison(_name, _of_itself)
for _name, _function in {"ceil": math.ceil, "floor": math.floor, "trunc": math.trunc, "neg": operator.neg, "abs": abs}.items():
    _set_function(_name, _function)
for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    _set_operator(_name, getattr(operator, _name))


def _trail_of(numbers: Iterable[Any]) -> Trail | None:
    return next((one.trail for one in numbers if type(one) in FOLLOWED), None)


def compute_tracked(function: Callable[..., Any], *numbers: Any) -> Any:
    """The result of a pure function of numbers; a followed number if one of them is. The memo compares functions by identity, so a lambda
    made for each call is recorded each time."""
    trail = _trail_of(numbers)
    return function(*numbers) if trail is None else trail.step(function, *numbers)


def answer(function: Callable[..., Answer], *numbers: Any) -> Answer:
    """The answer of a pure function of numbers that compares them in its own way; at other sizes the answer must be the same."""
    trail = _trail_of(numbers)
    return function(*numbers) if trail is None else trail.ask(function, *numbers)


def largest(*numbers: Any) -> Any:
    """The largest of the numbers, at other sizes too, whichever it is."""
    return compute_tracked(_largest, *numbers)


def smallest(*numbers: Any) -> Any:
    """The smallest of the numbers, at other sizes too, whichever it is."""
    return compute_tracked(_smallest, *numbers)


def _largest(*numbers: Number) -> Number:
    return max(numbers)


def _smallest(*numbers: Number) -> Number:
    return min(numbers)


def is_tracked(value: object) -> bool:
    return type(value) in FOLLOWED
