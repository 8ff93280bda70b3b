"""Python numbers as inputs of a program: unknown numbers in the trace, and tensors in its graph.

    beta = 0.3        loss = mse + beta * kl            traced with its value      mul(kl, 0.3)
                                                        as an input                mul(kl, beta.to(float32))     beta: "f64[]"

Python computes with such a number as with any other (torch's symbolic floats: `1 - beta`, `min(1.0, step / 100)`), and results keep the
dtype that they had. A branch on a comparison with a constant takes its present outcome, which becomes part of the key. A call that takes
the number itself, and no tensor (a size, an index, `range`, the probability of a dropout), cannot have it as an input.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final

import sympy
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from meshc.errors import CaptureError
from meshc.frontend.inserted_calls import InsertedCalls
from meshc.frontend.read_places import ReadPlace, place_of
from meshc.frontend.read_values import Number, is_number, name_at
from meshc.frontend.sources import source_of
from meshc.ir.functions import Function, Target
from meshc.optimizer.spec import NumberGuard
from meshc.replacements import replace_targets

BUFFER: Final = "meshc_number_"
_RELATIONS: Final[Mapping[type, tuple[str, str]]] = {
    sympy.StrictGreaterThan: (">", "<"), sympy.GreaterThan: (">=", "<="), sympy.StrictLessThan: ("<", ">"),
    sympy.LessThan: ("<=", ">="), sympy.Equality: ("==", "=="), sympy.Unequality: ("!=", "!="),
}  # fmt: skip
"""Relation -> its sign, and its sign with the sides exchanged."""

NUMBERS: Final[Mapping[Target, Target]] = {
    **{one: one for one in (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.abs)},
    **{one: one for one in (operator.floordiv, operator.mod, operator.pos)},
    math.sqrt: torch.sqrt, torch.sym_max: torch.clamp_min, torch.sym_min: torch.clamp_max,
}  # fmt: skip
"""Functions of Python numbers -> the same functions of tensors."""
TWO: Final[Mapping[Target, Target]] = {torch.sym_max: torch.maximum, torch.sym_min: torch.minimum}
BY_NUMBERS: Final = frozenset(
    "add sub rsub mul multiply div divide true_divide truediv pow iadd isub imul itruediv subtract add_ sub_ mul_ div_ gt ge lt le eq ne "
    "where masked_fill clamp clip clamp_min clamp_max".split()
)
"""Operators, functions and methods that take a tensor in the place of a number."""


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
        if type(expr) not in _RELATIONS:
            return None
        written, turned = _RELATIONS[type(expr)]
        for one, other, relation in ((expr.lhs, expr.rhs, written), (expr.rhs, expr.lhs, turned)):
            if one in self._symbols and other.is_number:
                guard = NumberGuard(self._symbols[one].name, relation, float(other))
                self._guards[guard] = None
                return bool(guard.outcome(self.values))
        return None

    def write(self, graph: GraphModule, constants: Set[ReadPlace]) -> None:
        """Make the numbers tensors of a graph traced under `read_as_inputs`: attributes named `BUFFER` and a number. Raises CaptureError
        for a use that takes no tensor, or a number that is a constant of the trace."""
        fixed = [one.name for place, one in self._numbers.items() if place in constants]
        if fixed:
            raise CaptureError(f"{', '.join(fixed)}: its value decides what is traced")
        if self._numbers:
            _NumberWriter(graph).write()


def _unique(names: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        times = next(times for times in range(1, sys.maxsize) if (name if times == 1 else f"{name}_{times}") not in found)
        found[name if times == 1 else f"{name}_{times}"] = None
    return list(found)


class _NumberWriter(InsertedCalls):
    """Rewrites one graph: its numbers become 0-dim tensors, in double precision."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self._tensors: dict[Node, Node] = {}
        """Number of the graph -> the tensor that stands for it."""

    def write(self) -> None:
        nodes = list(self._graph.nodes)
        for node in nodes:
            value = node.meta.get("example_value")
            if node.op == "get_attr" and BUFFER in node.name:
                self._begin(node)
            elif isinstance(value, torch.SymInt | torch.SymFloat):
                self._number(node)
            elif not isinstance(value, torch.SymBool) and any(one in self._tensors for one in node.all_input_nodes):
                self._user(node)
        for node in reversed(nodes):
            if isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool) or BUFFER in node.name:
                if not node.users:
                    self._graph.erase_node(node)
        self._module.recompile()

    def _begin(self, node: Node) -> None:
        name = BUFFER + node.name.rpartition(BUFFER)[2]
        with self._mode:
            tensor = torch.zeros((), dtype=torch.float64)
        self._module.register_buffer(name, tensor)
        with self._graph.inserting_before(node):
            made = self._graph.get_attr(name)
        made.meta["example_value"] = tensor
        for item in node.users:
            self._tensors[item] = made

    def _number(self, node: Node) -> None:
        if node in self._tensors or not any(one in self._tensors for one in node.all_input_nodes):
            return
        target = node.target
        if getattr(target, "__name__", "") in ("_sym_sqrt", "sym_sqrt"):
            target = math.sqrt
        if getattr(target, "__name__", "") == "sym_float":
            self._tensors[node] = self._tensors[node.all_input_nodes[0]]
            return
        if node.op != "call_function" or target not in NUMBERS or node.kwargs:
            raise self._refusal(node)
        args = [self._tensors.get(one, one) if isinstance(one, Node) else one for one in node.args]
        made = NUMBERS[target]
        if target in TWO:
            args = sorted(args, key=lambda one: not isinstance(one, Node))  # the tensor first
            made = TWO[target] if all(isinstance(one, Node) for one in args) else made
        self._tensors[node] = self._call(node, made, *args)

    def _user(self, node: Node) -> None:
        """A call that computes a tensor from a number and other operands."""
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            raise self._refusal(node)
        if name in ("full", "full_like", "tensor", "_to_tensor", "scalar_tensor", "as_tensor"):
            return self._write_fill(node, name, value)
        alpha = node.kwargs.get("alpha")
        if isinstance(alpha, Node) and alpha in self._tensors and len(node.args) == 2:
            scaled = self._call(node, operator.mul, node.args[1], self._cast(node, alpha, [node.args[1]], value))
            node.args, node.kwargs = (node.args[0], scaled), {one: given for one, given in node.kwargs.items() if one != "alpha"}
        if name not in BY_NUMBERS:
            raise self._refusal(node)
        others = [one for one in node.all_input_nodes if one not in self._tensors]
        cast = {one: self._cast(node, one, others, value) for one in node.all_input_nodes if one in self._tensors}
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda one: cast.get(one, one))
        try:
            found = self._example(node.op, node.target, node.args, node.kwargs)
        except (RuntimeError, TypeError) as error:
            raise self._refusal(node) from error
        if not _alike(found, value):
            raise self._refusal(node)
        return None

    def _write_fill(self, node: Node, name: str, value: torch.Tensor) -> None:
        number, *others = [one for one in node.all_input_nodes if one in self._tensors]
        if others:
            raise self._refusal(node)
        made = self._call(node, "to", self._tensors[number], value.dtype)
        if value.dim():
            ones = self._call(node, torch.ones, tuple(value.shape), dtype=value.dtype)
            made = self._call(node, torch.mul, ones, made)
        if not _alike(made.meta["example_value"], value) or any(isinstance(extent, torch.SymInt) for extent in value.shape):
            raise self._refusal(node)
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)

    def _cast(self, user: Node, number: Node, others: Sequence[Any], value: torch.Tensor) -> Node:
        """A number as an operand: uncast beside a tensor with dims and the result's dtype, where a 0-dim operand does not decide the
        dtype."""
        tensor = self._tensors[number]
        examples = [one.meta.get("example_value") for one in others]
        if any(isinstance(one, torch.Tensor) and one.dim() and one.dtype == value.dtype for one in examples):
            return tensor
        dtype = value.dtype
        if not dtype.is_floating_point:
            dtype = next((one.dtype for one in examples if isinstance(one, torch.Tensor) and one.dtype.is_floating_point), torch.float64)
        if dtype in (torch.float16, torch.bfloat16):
            raise self._refusal(user)
        return self._call(user, "to", tensor, dtype)

    def _refusal(self, node: Node) -> CaptureError:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return CaptureError(f"{source_of(node)}: {name} takes the number itself, and no tensor")


def _alike(one: object, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype == other.dtype and tuple(one.shape) == tuple(other.shape)
