"""Symbolic sizes, known only when a program is called: integers that carry the sympy expression they were computed by.

    n = symbol("n_batch", 11)        an integer, 11, wherever a pass computes with it, and `n_batch` where it is printed
    -(-n // 2) * 16                  176, printed as `-(-n_batch // 2) * 16`

Passes run as they do for a fixed size; each number they compute from a size carries its expression. `at` substitutes other sizes. A
decision that a pass takes by a comparison is taken once for all sizes, so the integer that stands for a size (the hint) is a prime to which
nothing else in the model fits: neither the hint nor a tile of it divides by an axis, and it equals no other size.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias, overload

import sympy

from meshc.errors import ArtifactError
from meshc.ir.bounds import MOST_NODES, MOST_ROUNDINGS, MOST_ROUNDINGS_MULTIPLIED, MOST_SIZE, MOST_TERMS, brief_repr

Number: TypeAlias = int | float
"""Plain, or open: a `Size` is an int and a `Ratio` a float."""
PREFIX = "n_"
"""Prefix of a symbol's name; no value of a program has such a name."""


@dataclass(frozen=True)
class Dynamic:
    """One dynamic size: the user's name, the least and greatest value, and the integer (`hint`) that stands for the size in passes."""

    name: str
    low: int
    high: int
    hint: int

    @property
    def symbol(self) -> str:
        return PREFIX + self.name

    def __str__(self) -> str:
        return f"{self.name} from {self.low} to {self.high}"


class _Open:
    """Arithmetic that keeps expressions. A plain float as the left operand would lose the expression: write 1 / size, not 1.0 / size.

    To a type checker a size is an int and a ratio a float. The operators are set below, from a table.
    """

    expr: sympy.Expr

    def __new__(cls, value: float, expr: sympy.Expr) -> Any:
        made = super().__new__(cls, value)  # type: ignore[call-arg]
        made.expr = expr
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_plain(self), self.expr)  # type: ignore[arg-type]


class Size(_Open, int):
    """An integer with its expression. Arithmetic gives a size or a ratio again, or a plain number where no symbol is left.

    Two sizes are equal if their expressions are; a size equals a plain number if the integer that stands for it does.
    """

    def __repr__(self) -> str:
        return text(self.expr)

    __str__ = __repr__

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Size):
            return int(self) == int(other) and _are_equal(self.expr, other.expr)
        return int.__eq__(self, other) and _noted.get() is None if isinstance(other, int) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return int.__bool__(self) or _noted.get() is not None

    def __lt__(self, other: object) -> bool:
        return NotImplemented if not isinstance(other, int) else _is_less(self, other)

    def __ge__(self, other: object) -> bool:
        return NotImplemented if not isinstance(other, int) else not _is_less(self, other)

    def __le__(self, other: object) -> bool:
        return NotImplemented if not isinstance(other, int) else not _is_less(other, self)

    def __gt__(self, other: object) -> bool:
        return NotImplemented if not isinstance(other, int) else _is_less(other, self)


Relation: TypeAlias = tuple[str, sympy.Expr, sympy.Expr]
"""(sign, left, right)."""
_noted: ContextVar[dict[Relation, None] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noted_relations() -> Iterator[dict[Relation, None]]:
    """Which of two open sizes is the larger, as often as it is asked inside the block, at the hints. There a size equals no plain number,
    and none is zero: that it is one at the hints says nothing of others."""
    found: dict[Relation, None] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


@lru_cache(maxsize=100_000)
def _are_equal(one: sympy.Expr, other: sympy.Expr) -> bool:
    return one == other or sympy.cancel(one - other) == 0


def _is_less(left: int, right: int) -> bool:
    is_less = int.__lt__(left, right)
    if (found := _noted.get()) is not None:
        found["<" if is_less else ">=", expression_of(left), expression_of(right)] = None
    return is_less


class Ratio(_Open, float):
    """A float made of sizes (the factor of a mean): like `Size`."""

    def __repr__(self) -> str:
        return text(self.expr, False)

    __str__ = __repr__

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ratio):
            return _are_equal(self.expr, other.expr)
        return float.__eq__(self, other) and _noted.get() is None if isinstance(other, int | float) else NotImplemented


def symbol(dynamic: Dynamic) -> Size:
    return Size(dynamic.hint, sympy.Symbol(dynamic.symbol, integer=True, positive=True))


def number_from_expression(expr: sympy.Expr, hint: float) -> Number:
    """The number of an expression whose value at the hints is `hint`; plain where the expression has no symbols."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_number:
        return float(expr)
    if expr.is_integer or _integral(expr):
        return Size(int(hint), expr)
    return Ratio(float(hint), expr)


def _integral(expr: sympy.Expr) -> bool:
    """Whether an expression is an integer although sympy cannot tell: a quotient without remainder, by construction."""
    return not expr.atoms(sympy.Float) and expr.is_integer is None and expr.as_numer_denom()[1].is_Integer


_OPERATORS: Final[Mapping[str, tuple[str, Callable[[Number, Number], Number]]]] = {
    "+": ("add", operator.add),
    "-": ("sub", operator.sub),
    "*": ("mul", operator.mul),
    "//": ("floordiv", operator.floordiv),
    "%": ("mod", operator.mod),
    "/": ("truediv", operator.truediv),
}


def _apply(sign: str, left: object, right: object) -> object:
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return NotImplemented
    value = _OPERATORS[sign][1](_plain(left), _plain(right))
    expr = _apply_to_expressions(sign, expression_of(left), expression_of(right))
    if sign == "/" or isinstance(left, float) or isinstance(right, float):
        return float(expr) if expr.is_number else Ratio(float(value), expr)
    return int(expr) if expr.is_Integer else Size(int(value), expr)


def _set_operators(sign: str, name: str) -> None:
    setattr(_Open, f"__{name}__", lambda self, other: _apply(sign, self, other))
    setattr(_Open, f"__r{name}__", lambda self, other: _apply(sign, other, self))


for _sign, (_name, _) in _OPERATORS.items():
    _set_operators(_sign, _name)
setattr(_Open, "__neg__", lambda self: _apply("*", self, -1))  # noqa: B010


def _plain(value: Number) -> Number:
    return int(value) if isinstance(value, Size) else float(value) if isinstance(value, Ratio) else value


def expression_of(value: Number) -> sympy.Expr:
    return value.expr if isinstance(value, Size | Ratio) else sympy.sympify(value)


@lru_cache(maxsize=100_000)
def _apply_to_expressions(sign: str, left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    if sign == "//":
        return floor_quotient(left, right)
    if sign == "%":
        return sympy.Mod(left, right)
    return sympy.expand(_OPERATORS[sign][1](left, right))


def floor_quotient(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """left // right in canonical form: a negative quotient is written with ceiling."""
    quotient = sympy.cancel(left / right) if right.free_symbols else left / right
    return -sympy.ceiling(-quotient) if quotient.could_extract_minus_sign() else sympy.floor(quotient)


# ---------------------------------------------------------------------------------------------------------------------------- text


@lru_cache(maxsize=100_000)
def text(expr: sympy.Expr, exact: bool = True) -> str:
    """The expression as Python text; quotients are written with `//` if `exact`, else with `/`."""
    numerator, denominator = expr.as_numer_denom()
    if denominator != 1:
        return f"{_factor_text(numerator, exact)} {'//' if exact else '/'} {_factor_text(denominator, exact)}"
    if expr.is_Add:
        first, *rest = [text(term, exact) for term in expr.as_ordered_terms()]
        return first + "".join(f" - {term[1:]}" if term.startswith("-") else f" + {term}" for term in rest)
    if expr.is_Mul:
        factors = list(expr.as_ordered_factors())
        minus = factors[0] == -1
        shown = " * ".join(_factor_text(factor, exact) for factor in factors[minus:])
        return shown if not minus else shown[1:] if shown.startswith("-") else f"-{shown}"
    if expr.is_Pow and expr.args[1].is_Integer and expr.args[1] > 0:
        return f"{_factor_text(expr.args[0], exact)} ** {expr.args[1]}"
    return _atom(expr)


def _factor_text(expr: sympy.Expr, exact: bool) -> str:
    """The text of an expression as a factor, in parentheses where they are needed."""
    shown = text(expr, exact)
    return shown if expr.is_Atom or isinstance(expr, sympy.Function) or (-expr).is_Atom else f"({shown})"


def _atom(expr: sympy.Expr) -> str:
    if expr.is_Symbol or expr.is_Integer:
        return str(expr)
    if expr.is_Float:
        return repr(float(expr))
    if isinstance(expr, sympy.floor | sympy.ceiling):
        up = isinstance(expr, sympy.ceiling)
        numerator, denominator = (-expr.args[0] if up else expr.args[0]).as_numer_denom()
        return f"{'-' * up}({_factor_text(numerator, True)} // {_factor_text(denominator, True)})"
    if isinstance(expr, sympy.Mod):
        return f"({_factor_text(expr.args[0], True)} % {_factor_text(expr.args[1], True)})"
    if isinstance(expr, sympy.Max | sympy.Min):
        name = "max" if isinstance(expr, sympy.Max) else "min"
        return f"{name}({', '.join(sorted(text(item) for item in expr.args))})"
    raise ArtifactError(f"a size that is {expr} has no text")


def braced_text(size: int) -> str:
    """The text of a size in a type: an expression is put in braces."""
    shown = str(size)
    return f"{{{shown}}}" if isinstance(size, Size) and not shown.isidentifier() else shown


_OF_AST: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.Div: "/",
}  # fmt: skip


def from_ast(tree: ast.expr, hints: Mapping[str, int]) -> Number | None:
    """The number that a syntax tree describes, or None if it is no expression of sizes. Nothing is executed.

    Raises ArtifactError if the expression, its numbers, or its count of terms are larger than in any that is printed.
    """
    if sum(1 for _ in itertools.islice(ast.walk(tree), MOST_NODES + 1)) > MOST_NODES:
        raise ArtifactError(f"an expression of sizes has more than {MOST_NODES} names, numbers and signs")
    return _from_ast(tree, hints)


def _from_ast(tree: ast.expr, hints: Mapping[str, int]) -> Number | None:
    match tree:
        case ast.Name(id=name) if name in hints:
            return Size(hints[name], sympy.Symbol(name, integer=True, positive=True))
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _require_bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _from_ast(operand, hints)
            return None if inner is None else -inner
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OF_AST:
            a, b = _from_ast(left, hints), _from_ast(right, hints)
            if a is None or b is None or (b == 0 and not isinstance(sign, ast.Add | ast.Sub | ast.Mult)):
                return None
            _refuse_many_terms(_terms(a) * _terms(b))
            _refuse_many_roundings(a, b, multiplied=isinstance(sign, ast.Mult))
            return _require_bounded(_OPERATORS[_OF_AST[type(sign)]][1](a, b))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)) if 0 < power < 8:
            base = _from_ast(left, hints)
            if base is None:
                return None
            _refuse_many_terms(_terms(base) ** power)
            return number_from_expression(sympy.expand(expression_of(base) ** power), _require_bounded(_plain(base) ** power))
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=[_, *_] as items, keywords=[]):
            known = [one for item in items if (one := _from_ast(item, hints)) is not None]
            if len(known) < len(items):
                return None
            _refuse_many_roundings(*known, multiplied=False)
            return (largest if name == "max" else smallest)(*known)
    return None


def _require_bounded(value: Number) -> Number:
    if not -MOST_SIZE <= _plain(value) <= MOST_SIZE:
        raise ArtifactError(f"an expression of sizes comes to {brief_repr(_plain(value))}; sizes go to {MOST_SIZE}")
    return value


def _refuse_many_roundings(*operands: Number, multiplied: bool) -> None:
    """Raises ArtifactError for too many roundings (//, %, max, min): sympy takes for ever over nested ones, most of all in products."""
    open_ones = [value.expr for value in operands if isinstance(value, Size | Ratio)]
    count = sum(len(expr.atoms(*_ROUNDINGS)) for expr in open_ones)
    most = MOST_ROUNDINGS_MULTIPLIED if multiplied and len(open_ones) > 1 else MOST_ROUNDINGS
    if count > most:
        raise ArtifactError(f"an expression of sizes has {count} roundings (//, %, max, min); at most {most} are read in one")


_ROUNDINGS: Final = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.Max, sympy.Min)


def _terms(value: Number) -> int:
    return len(value.expr.args) if isinstance(value, Size | Ratio) and value.expr.is_Add else 1


def _refuse_many_terms(terms: int) -> None:
    if terms > MOST_TERMS:
        raise ArtifactError(
            f"an expression of sizes has {brief_repr(terms)} terms or so when multiplied out; at most {MOST_TERMS} are read"
        )


def parse(source: str, hints: Mapping[str, int]) -> Number:
    """The number that `source` describes. Raises ArtifactError."""
    try:
        found = from_ast(ast.parse(source.strip(), mode="eval").body, hints)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        found = None
    if found is None:
        raise ArtifactError(f"{brief_repr(source)} is no size: a number, or an expression of {', '.join(hints) or 'numbers'}")
    return found


def largest(*items: Number) -> Number:
    return number_from_expression(sympy.Max(*map(expression_of, items)), max(map(_plain, items)))


def smallest(*items: Number) -> Number:
    return number_from_expression(sympy.Min(*map(expression_of, items)), min(map(_plain, items)))


# --------------------------------------------------------------------------------------------------------------------- other sizes


@overload
def at(value: int, sizes: Mapping[str, int]) -> int: ...


@overload
def at(value: float, sizes: Mapping[str, int]) -> Number: ...


@overload
def at(value: object, sizes: Mapping[str, int]) -> object: ...


def at(value: object, sizes: Mapping[str, int]) -> object:
    """The number with `sizes` substituted, by symbol; a value that is no `Size` or `Ratio` is returned as it is."""
    return _value(value.expr, tuple(sorted(sizes.items()))) if isinstance(value, Size | Ratio) else value


@lru_cache(maxsize=100_000)
def _value(expr: sympy.Expr, sizes: tuple[tuple[str, int], ...]) -> Number:
    found = expr.subs({sympy.Symbol(name, integer=True, positive=True): size for name, size in sizes})
    if not found.is_number or found.is_finite is False:
        raise ArtifactError(f"{text(expr)} has no value at {dict(sizes)}")
    return int(found) if found.is_Integer else float(found)


def hint_for(wanted: int, low: int, high: int, taken: set[int], extents: set[int], pieces: int) -> int:
    """A prime above `pieces`, one more than a multiple of `pieces`, not in `taken` and dividing none of `extents`; from `low` to `high` if
    possible.

    One more than a multiple, so that no tile divides by the next axis if several split a dim one after the other: 5 has tiles of 3, then of
    2, each uneven, where 7 has tiles of 4, and those of 2 evenly, as at few other sizes. The next such prime below `wanted` is taken, or
    else above: models have upper limits (tables of positions) more often than lower ones.
    """
    step = max(pieces, 1)

    def fits(number: int) -> bool:
        free = number > max(pieces, 2) and number % step == 1 % step and number not in taken
        return free and not any(extent and extent % number == 0 for extent in extents)

    for number in (*range(min(wanted, high), low - 1, -1), *range(wanted, min(high, 4 * wanted + 64 * step) + 1)):
        if fits(number) and sympy.isprime(number):
            return number
    number = -(-max(wanted, pieces) // step) * step + 1
    while not (fits(number) and sympy.isprime(number)):
        number += step
    return number


WORLDS = 6
"""Number of assignments of sizes, enough to tell apart functions of sizes (halves that round up or down, and so on)."""


def worlds(sizes: Sequence[Dynamic]) -> list[dict[str, int]]:
    """`WORLDS` assignments of sizes, by symbol, from the sizes' ranges where these have as many; the first is the hints."""
    found: list[dict[str, int]] = [{} for _ in range(WORLDS)]
    for place, size in enumerate(sizes):
        middle = min(size.hint, size.high)
        reach = range(max(size.low, middle - 2 * WORLDS), min(size.high, middle + 2 * WORLDS) + 1)
        near = sorted((number for number in reach if number != size.hint), key=lambda number: abs(number - size.hint))
        near += range(max(size.hint, size.high) + 1, max(size.hint, size.high) + WORLDS + 1)
        near = near[: WORLDS - 1]
        turn = place % len(near)  # so that no two sizes go in step
        for world, number in zip(found, (size.hint, *near[turn:], *near[:turn]), strict=True):
            world[size.symbol] = number
    return found
