"""Python numbers as inputs of a program: unknown numbers in the trace, and tensors in its graph.

    beta = 0.3        loss = mse + beta * kl            traced with its value      mul(kl, 0.3)
                                                        as an input                mul(kl, beta.to(float32))     beta: "f64[]"

Python computes with such a number as with any other (torch's symbolic floats: `1 - beta`, `min(1.0, step / 100)`), and results keep the
dtype that they had. A branch on a comparison with a constant takes its present outcome, which becomes part of the key. A call that takes
the number itself, and no tensor (a size, an index, `range`, the probability of a dropout), cannot have it as an input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain, count
from typing import Any

import sympy
import torch
from torch import nn

from meshc.errors import CaptureError
from meshc.frontend.number_tensors import BUFFER
from meshc.frontend.read_places import ReadPlace, place_of
from meshc.frontend.read_values import Number, is_number, name_at
from meshc.ir.functions import Function
from meshc.optimizer.spec import NumberGuard
from meshc.replacements import replace_targets


class NumberInputs:
    """The numbers of one trace that are inputs."""

    def __init__(self, places: Sequence[ReadPlace], model: nn.Module, function: Function) -> None:
        found = [(place, *name_at(place, model, function)) for place in places]
        kept = [(place, name, value) for place, name, value in found if is_number(value)]
        names = _unique([name for _, name, _ in kept])
        self.values: dict[str, float] = {name: value for name, (_, _, value) in zip(names, kept, strict=True)}
        self._numbers = {place: Number(name, place, type(value) is int) for name, (place, _, value) in zip(names, kept, strict=True)}
        self._symbols: dict[sympy.Symbol, Number] = {}
        self._guards: dict[NumberGuard, None] = {}

    @property
    def numbers(self) -> tuple[Number, ...]:
        rows = self._numbers.values()
        return tuple(replace(one, guards=tuple(each for each in self._guards if each.number == one.name)) for one in rows)

    @property
    def by_attribute(self) -> dict[str, Number]:
        """The numbers by the attribute of the graph that stands for each."""
        return {f"{BUFFER}{at}": one for at, one in enumerate(self.numbers)}

    def register(self, root: nn.Module) -> None:
        """Register a buffer for each number on `root`. Called under the trace's fake tensor mode."""
        for at, one in enumerate(self._numbers.values()):
            root.register_buffer(f"{BUFFER}{at}", torch.zeros((), dtype=torch.int64 if one.whole else torch.float64))

    @contextlib.contextmanager
    def read_as_inputs(self, root: nn.Module) -> Iterator[None]:
        """A context for one trace, in which these numbers are read from their buffers."""
        if not self._numbers:
            yield
            return
        from meshc.private import (
            AttrSource,
            LazyCache,
            LocalSource,
            SymNodeVariable,
            UnspecializedNNModuleSource,
            VariableBuilder,
            variables,
        )

        lazy = variables.LazyConstantVariable.create
        wrap, evaluate = VariableBuilder._wrap, SymNodeVariable.evaluate_expr
        order = {place: at for at, place in enumerate(self._numbers)}
        held_by = UnspecializedNNModuleSource(AttrSource(LocalSource("self"), "_export_root"))  # so its tensors are graph attributes

        def wrap_number(self_: Any, value: object) -> Any:
            place = place_of(self_.source) if type(value) in (int, float) else None
            if place not in order:
                return wrap(self_, value)
            name = f"{BUFFER}{order[place]}"
            tensor = VariableBuilder(self_.tx, AttrSource(held_by, name))(getattr(root, name))
            found: Any = tensor.call_method(self_.tx, "item", [], {})
            self._symbols[found.sym_num.node.expr] = self._numbers[place]
            return found

        def put_off(value: object, source: Any, **options: Any) -> Any:
            """A lazy variable until it is used; torch's lazy constants would stay constants."""
            if place_of(source) not in order:
                return lazy(value, source, **options)
            return variables.LazyVariableTracker(LazyCache(value, source), source=source, **options)

        def evaluate_guard(self_: Any, *given: Any, **named: Any) -> Any:
            outcome = self._outcome(self_.sym_num) if isinstance(self_.sym_num, torch.SymBool) else None
            return evaluate(self_, *given, **named) if outcome is None else outcome

        with replace_targets(wrapped_number=wrap_number, lazy_number=staticmethod(put_off), number_guard=evaluate_guard):
            yield

    def _outcome(self, asked: torch.SymBool) -> bool | None:
        """The outcome of a comparison of one of the numbers with a constant, which becomes a guard; None for any other condition."""
        expr = asked.node.expr
        for relation in (expr, expr.reversed) if isinstance(expr, sympy.Rel) else ():
            if relation.lhs in self._symbols and relation.rhs.is_number:
                guard = NumberGuard(self._symbols[relation.lhs].name, relation.rel_op, float(relation.rhs))
                self._guards[guard] = None
                return bool(guard.outcome(self.values))
        return None

    def refuse_constants(self, constants: Set[ReadPlace]) -> None:
        """Raises CaptureError for a number that is a constant of the trace."""
        fixed = [one.name for place, one in self._numbers.items() if place in constants]
        if fixed:
            raise CaptureError(f"{', '.join(fixed)}: its value decides what is traced")


def _unique(names: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{times}" for times in count(2))
        found[next(one for one in chain((name,), numbered) if one not in found)] = None
    return list(found)
