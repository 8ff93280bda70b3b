"""Rewrite of Python numbers without a value as 0-dim tensors: numbers that tensors hold, counts of selected rows, inputs of a program.

    n = int(self.ptr);  x * (n + 1)        mul(x, ptr.to(int64) + 1)
    beta = 0.3;  a + beta * b              add(a, mul(b, beta))           beta: an attribute of the graph, in double precision
    torch.full((4,), beta)                 mul(ones(4), beta.to(float32))

Results keep their dtypes. A call that takes the number itself, and no tensor, cannot be followed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from meshc.frontend.inserted_calls import map_arguments
from meshc.frontend.joined_rows import JoinedRows
from meshc.frontend.selected_places import DataNumber, NotFollowed, SelectedRows, first_of, index_of, is_unbacked, value_of
from meshc.ir.functions import Target

BUFFER: Final = "meshc_number_"
"""Name of an attribute of a graph that is a number of Python, followed by the number's position among these."""
SIZED: Final = frozenset("view reshape expand zeros ones full empty new_zeros new_ones new_full new_empty broadcast_to unflatten".split())
"""Calls that take the number of rows as a size."""
FILLS: Final = frozenset("full full_like tensor _to_tensor scalar_tensor as_tensor".split())
"""Calls that make a tensor of one number."""
NUMBERS: Final[Mapping[Target, Target]] = {
    **{one: one for one in (
        operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.abs, operator.floordiv,
        operator.mod, operator.pos,
    )},
    math.sqrt: torch.sqrt, torch.sym_max: torch.clamp_min, torch.sym_min: torch.clamp_max,
}  # fmt: skip
"""Functions of Python numbers -> the same functions of tensors."""
TWO: Final[Mapping[Target, Target]] = {torch.sym_max: torch.maximum, torch.sym_min: torch.minimum}
BY_NUMBERS: Final = frozenset(
    "add sub rsub mul multiply div divide true_divide truediv pow iadd isub imul itruediv subtract add_ sub_ mul_ div_ gt ge lt le eq ne "
    "where masked_fill clamp clip clamp_min clamp_max".split()
)
"""Operators, functions and methods that take a tensor in the place of a number."""


class NumberTensors(JoinedRows):
    """Numbers of one graph, and the calls that take them."""

    def begin_number(self, node: Node) -> None:
        """`tensor.item()`; of an input the tensor itself, which is float64 from here on."""
        held: Any = node.args[0]
        if held.op == "get_attr" and BUFFER in str(held.target):
            held.target = BUFFER + str(held.target).rpartition(BUFFER)[2]
            with self._mode:
                held.meta["example_value"] = torch.zeros((), dtype=torch.float64)
            self._module.register_buffer(held.target, held.meta["example_value"])
            self.inputs.add(node)
        else:
            held = self._call(node, "reshape", self._call(node, "clone", self._call(node, "detach", held)), [])
            held = self.to(node, held, torch.float64 if value_of(held).is_floating_point() else torch.int64)
        self.numbers[node] = DataNumber(held, None)

    def to(self, node: Node, tensor: Node, dtype: torch.dtype) -> Node:
        return tensor if value_of(tensor).dtype == dtype else self._call(node, "to", tensor, dtype)

    def call_arguments(
        self, node: Node, name: str, row: Callable[[Node], Any], size: Callable[[Any], int], tensor: Callable[[Node], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments with the values that stand for rows; their number is a size where the call takes a size, else a tensor."""

        def one(argument: Node) -> Any:
            if argument in self.rows:
                return row(argument)
            if argument not in self.numbers:
                return argument
            return size(value_of(argument)) if name in SIZED else tensor(argument)

        return map_arguments(node, one)

    def number_position(self, node: Node) -> int | None:
        """The first position of an index with a number that data decides; None if there is none."""
        found = [dim for dim, one in enumerate(index_of(node)) if any(each in self.numbers for each in nodes_in(one))]
        return found[0] if found and first_of(node) not in self.begun else None

    def numbers_in(self, node: Node) -> list[Node]:
        return [one for one in node.all_input_nodes if one in self.numbers]

    # Numbers computed from numbers.

    def number(self, node: Node, name: str) -> None:
        first = node.all_input_nodes[0]
        held = self.rows_of(first)
        if held is not None:
            if name not in ("sym_size", "sym_size.int", "size", "sym_numel", "numel") or node.kwargs:
                raise NotFollowed("a number is read of them")
            of = value_of(first)
            counted = self._call(node, "sum", held.chosen.mask)
            if name in ("sym_numel", "numel"):
                counted = self._call(node, operator.mul, counted, math.prod(value_of(held.value).shape[1:]))
            elif [one % of.dim() for one in node.args[1:] if isinstance(one, int)] != [held.at]:
                raise NotFollowed("a number is read of them")
            self.numbers[node] = DataNumber(counted, held.chosen)
            return
        rows = [self.numbers[one] for one in self.numbers_in(node)]
        if name in ("sym_float", "sym_int") and len(rows) == 1:
            whole = self.to(node, rows[0].tensor, torch.int64 if name == "sym_int" else torch.float64)
            self.numbers[node] = DataNumber(whole, rows[0].chosen)
            return
        target: Any = math.sqrt if name in ("_sym_sqrt", "sym_sqrt") else node.target
        if target not in NUMBERS or node.kwargs:
            raise NotFollowed("what is done with how many there are has no counterpart among tensors")
        args: list[Any] = [self.numbers[one].tensor if isinstance(one, Node) and one in self.numbers else one for one in node.args]
        made = NUMBERS[target]
        if target in (operator.truediv, math.sqrt):  # Python computes these in double precision
            args = [self.to(node, one, torch.float64) if isinstance(one, Node) and one not in node.args else one for one in args]
        if target in TWO:
            args = sorted(args, key=lambda one: not isinstance(one, Node))  # the tensor first
            made = TWO[target] if all(isinstance(one, Node) for one in args) else made
        chosen = self.selection_of_size(value_of(node)) or next((one.chosen for one in rows if one.chosen is not None), None)
        self.numbers[node] = DataNumber(self._call(node, made, *args), chosen)

    # Tensors computed from numbers.

    def by_number(self, node: Node, name: str) -> None:
        """A call that reads no rows, but their number."""
        value = value_of(node)
        if not isinstance(value, Tensor):
            raise NotFollowed("how many they are decides something else than a tensor")
        if is_unbacked(node):
            if name not in SIZED:
                raise NotFollowed(f"{name}() makes a tensor of as many")
            args, kwargs = self.call_arguments(node, name, lambda one: one, self.size_of_all, lambda one: one)
            chosen = self.selection_of_size(value.shape[0]) if value.dim() else None
            if chosen is None:
                raise NotFollowed(f"{name}() makes a tensor of as many")
            self.rows[node] = SelectedRows(self._call(node, node.target, *args, **kwargs), chosen)
            return
        numbers = self.numbers_in(node)
        if name in FILLS and len(numbers) == 1 and not any(isinstance(extent, torch.SymInt) for extent in value.shape):
            made = self.to(node, self.numbers[numbers[0]].tensor, value.dtype)
            if value.dim():
                made = self._call(node, torch.mul, self._call(node, torch.ones, tuple(value.shape), dtype=value.dtype), made)
            node.replace_all_uses_with(made)
            return
        if name not in BY_NUMBERS:
            raise NotFollowed(f"{name}() takes the number itself, and no tensor")
        for cast in (self.cast, lambda node, one: self.to(node, self.numbers[one].tensor, value.dtype)):
            args, kwargs = map_arguments(node, partial(in_place_of, {one: cast(node, one) for one in numbers}))
            if (alpha := node.kwargs.get("alpha")) in numbers and len(args) == 2:
                args = args[0], self._call(node, operator.mul, args[1], self.cast(node, alpha, [node.args[1]]))
                kwargs = {key: one for key, one in kwargs.items() if key != "alpha"}
            made = self._call(node, node.target, *args, **kwargs)
            if value_of(made).dtype == value.dtype and value_of(made).shape == value.shape:
                node.replace_all_uses_with(made)
                return
        raise NotFollowed(f"{name}() gives another dtype of a tensor than of a number")

    def cast(self, node: Node, number: Any, beside: Sequence[Any] | None = None) -> Node:
        """A number as an operand of a call: uncast beside a tensor with dims and the result's dtype, where a 0-dim operand does not decide
        the dtype. Raises NotFollowed for an input that would be rounded to half precision."""
        tensor, dtype = self.numbers[number].tensor, value_of(node).dtype
        given = [one for one in (node.all_input_nodes if beside is None else beside) if isinstance(one, Node) and one not in self.numbers]
        examples = [value_of(one) for one in given if isinstance(value_of(one), Tensor)]
        if not value_of(tensor).is_floating_point() or any(one.dim() and one.dtype == dtype for one in examples):
            return tensor
        if not dtype.is_floating_point:
            dtype = next((one.dtype for one in examples if one.dtype.is_floating_point), torch.float64)
        if dtype in (torch.float16, torch.bfloat16) and any(one in self.inputs for one in self.begun[number]):
            raise NotFollowed("it would be rounded")
        return self.to(node, tensor, dtype)


def in_place_of(values: Mapping[Node, Any], node: Node) -> Any:
    return values.get(node, node)


def nodes_in(given: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(given, lambda one: found.append(one))
    return found
