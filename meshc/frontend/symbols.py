"""Symbolic sizes of a trace, translated from torch's to meshc's: open sizes become `Size`, assumptions of the trace become constraints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, overload

import sympy
import torch
from torch.fx.node import Argument

from meshc.errors import CompileError
from meshc.ir.sizes import PREFIX, Dynamic, floor_quotient, number_from_expression, text

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, ShapeGuard

_BOUNDS = ("<", "<=", ">", ">=")


class Symbols:
    """Torch's symbols of one trace, and the user's dynamic sizes that they stand for."""

    def __init__(self, extents: Sequence[tuple[torch.SymInt, Dynamic]]) -> None:
        """extents: open dims of the trace's inputs, each with the user's dynamic size."""
        self.extents = list(extents)

    def _names(self) -> tuple[tuple[sympy.Expr, sympy.Symbol], ...]:
        """Torch replaces one symbol by another as it learns that they are equal, so this is computed anew each time."""
        found = {}
        for extent, size in self.extents:
            name = sympy.Symbol(size.symbol, integer=True, positive=True)
            found[extent.node._expr] = found[extent.node.expr] = name
        return tuple(found.items())

    @overload
    def open(self, value: int | torch.SymInt) -> int: ...

    @overload
    def open(self, value: Argument) -> Argument: ...

    @overload
    def open(self, value: object) -> object: ...

    def open(self, value: object) -> object:
        """A number of the trace: plain where it is fixed, a Size or a Ratio where it is open.

        Expanded, as arithmetic with sizes leaves them: two sizes are equal if their expressions are, and torch keeps n * (m - 1).
        """
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        return number_from_expression(sympy.expand(self._translate(value.node.expr)), value.node.hint)

    def shape(self, shape: Iterable[int | torch.SymInt]) -> tuple[int, ...]:
        return tuple(self.open(extent) for extent in shape)

    def constraints(self, env: ShapeEnv | None, sizes: Sequence[Dynamic]) -> tuple[tuple[Dynamic, ...], tuple[str, ...]]:
        """What tracing assumed of the sizes: narrowed ranges, and conditions that no range expresses: `n_seq % 4 == 0`."""
        found: dict[str, None] = {}
        ranges = {size.symbol: size for size in sizes}
        for guard in env.guards if env is not None else ():
            if _of_a_kernel(guard):
                continue
            expr = self._translate(guard.expr)
            if expr is sympy.true or expr is True:
                continue
            sign = expr.rel_op if isinstance(expr, sympy.Rel) else None
            if sign == "==" and (expr.lhs.is_Symbol and expr.rhs.is_number or expr.rhs.is_Symbol and expr.lhs.is_number):
                name, number = (expr.lhs, expr.rhs) if expr.lhs.is_Symbol else (expr.rhs, expr.lhs)
                raise CompileError(
                    f"the model fixes the size {str(name).removeprefix(PREFIX)}: with it tried as {number}, tracing branched on that number"
                    f"{_place(guard)}\n  what to do: leave the size out of Options(dynamic=...), or take the branch out of the model"
                )
            if sign is None:
                raise CompileError(f"the model asks of its dynamic sizes that {guard.expr}, which no check of meshc's says")
            if expr.lhs.is_Symbol and expr.rhs.is_Integer and sign in _BOUNDS:
                ranges[str(expr.lhs)] = _narrow(ranges[str(expr.lhs)], sign, int(expr.rhs))
            else:
                found[f"{text(expr.lhs)} {sign} {text(expr.rhs)}"] = None
        return tuple(ranges.values()), tuple(found)

    def _translate(self, expr: sympy.Expr) -> sympy.Expr:
        return _as_sympy(expr, self._names())


def _narrow(size: Dynamic, sign: str, bound: int) -> Dynamic:
    if sign in ("<", "<="):
        return replace(size, high=min(size.high, bound - (sign == "<")))
    return replace(size, low=max(size.low, bound + (sign == ">")))


def _of_a_kernel(guard: ShapeGuard) -> bool:
    """Whether a guard only chose the kernel of a convolution on the tracing machine, which no program depends on."""
    frame = getattr(guard.sloc, "framework_loc", None)
    return getattr(frame, "name", "") == "conv" and str(getattr(frame, "filename", "")).endswith("fake_impls.py")


def _place(guard: ShapeGuard) -> str:
    """Where a guard comes from, in the user's model if torch knows, else in torch."""
    user = getattr(guard.sloc, "maybe_user_loc", None)
    frame = getattr(guard.sloc, "framework_loc", None)
    return f", at {user or frame}" if user or frame else ""


@lru_cache(maxsize=100_000)
def _as_sympy(expr: sympy.Expr, names: tuple[tuple[sympy.Expr, sympy.Symbol], ...]) -> sympy.Expr:
    """An expression with torch's own integer functions as sympy's, and meshc's symbols."""
    if expr.is_Symbol:
        found = dict(names).get(expr)
        if found is None:
            raise CompileError(f"the model makes a size of its data ({expr}): a program's sizes follow from its inputs' shapes")
        return found
    if not getattr(expr, "args", ()):
        return expr
    args = [_as_sympy(item, names) for item in expr.args]
    match type(expr).__name__:
        case "FloorDiv" | "CleanDiv":
            return floor_quotient(args[0], args[1])
        case "CeilToInt" | "CeilDiv":
            return sympy.ceiling(args[0] if len(args) == 1 else args[0] / args[1])
        case "FloorToInt" | "TruncToInt" | "RoundToInt":
            return sympy.floor(args[0])
        case "Mod" | "PythonMod":
            return sympy.Mod(*args)
        case "IntTrueDiv" | "FloatTrueDiv":
            return args[0] / args[1]
        case "ToFloat" | "Identity":
            return args[0]
        case "FloatPow" | "PowByNatural":
            return args[0] ** args[1]
        case "Max" | "Min" as name:
            return getattr(sympy, name)(*args)
        case _:
            return expr.func(*args)

