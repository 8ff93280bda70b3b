"""Type of each value of a stage: the declared one against the one that its operator returns.

    mm: "f32[batch 8/dp, ffn 12/tp]" = aten.mm(x, w)      x [4, 6] and w [6, 3] on a rank give [4, 3], as the tile of the type must be

Readers of a wrong line take its declared type, so that each fault is reported once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from meshc import ir
from meshc.check import operators, spmd_types
from meshc.check.overwrites import OWN, writes
from meshc.check.types import Wrong, check_type
from meshc.ir import Record, spmd
from meshc.ir.functions import Target
from meshc.ir.keys import kind_of
from meshc.ir.schemas import RESHAPES
from meshc.ops.in_place import WRITERS
from meshc.private import OpOverload
from meshc.program.program import Stage
from meshc.text.allowed_operators import FUNCTIONS, refusal, spelling
from meshc.text.printer import print_type

aten = torch.ops.aten
Value: TypeAlias = Tensor | int | Sequence[Tensor | int] | None
"""A value without data: a meta tensor, an integer, several of them; None for a line without a valid type."""

PLACES: Final = ("start", "first", "real", "queries_of", "keys_of", "offsets", "place", "count")
"""Arguments of meshc's own operators that give the start or the length of a rank's tile: no shape depends on these."""


def faults(stage: Stage, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(value, message) for every wrong line. `sizes`: of all axes."""
    keys = iter(stage.inputs)
    values: dict[Node, Value] = {}
    roots: dict[Node, frozenset[str]] = {}
    for node in stage.graph.nodes:
        if node.op == "output":
            return
        key = next(keys) if node.op == "placeholder" else None
        roots[node] = _roots(node, roots) if key is None else frozenset({key})
        try:
            values[node] = _declared_value(node, sizes)
            if node.op == "call_function":
                values[node] = _computed_value(node, values, roots, sizes)
        except Wrong as wrong:
            what = f"{node.name} = {spelling(node.target)}(...)" if node.op == "call_function" else f"the parameter {node.name}"
            yield node.name, f"{what}: {wrong}"
            values.setdefault(node, None)


def _declared_value(node: Node, sizes: Mapping[str, int]) -> Value:
    """The declared type as values without data."""
    if not ir.has_record(node):
        raise Wrong('it has no type; a line is NAME: "TYPE" = OPERATOR(ARGUMENTS)')
    records = ir.records(node)
    for record in records:
        check_type(record, sizes)
    if node.op == "placeholder" and any(record.dtype is None for record in records):
        raise Wrong("a stage takes tensors")
    made = tuple(_empty(record) for record in records)
    return made if isinstance(node.meta[ir.KEY], tuple) else made[0]


def _empty(record: Record) -> Tensor | int:
    return spmd_types.INTEGER if record.dtype is None else torch.empty(record.shape, dtype=record.dtype, device="meta")


def _computed_value(node: Node, values: Mapping[Node, Value], roots: Mapping[Node, frozenset[str]], sizes: Mapping[str, int]) -> Value:
    """The result of the node's operator. Raises Wrong if another type is declared."""
    args = map_arg(node.args, lambda operand: values[operand])
    kwargs = map_arg(node.kwargs, lambda operand: values[operand])
    declared = node.meta[ir.KEY]
    if ir.is_getitem(node):
        found = _item(*cast(tuple[Value, object], args), **cast(dict[str, int], kwargs))
    elif node.target in FUNCTIONS.values():
        found = spmd_types.infer_result(node.target, args, kwargs, sizes)
    else:
        if why := refusal(node.target):
            raise Wrong(f"its operator is not on the allow-list: {why}")
        _check_writes(node, roots)
        _check_places(node, values)
        found = operators.infer_result(cast(OpOverload, node.target), args, kwargs, len(declared) if isinstance(declared, tuple) else 1)
    _compare(found, declared, sizes)
    return found


def _item(values: Value, index: object) -> Value:
    if not isinstance(values, list | tuple) or type(index) is not int or not 0 <= index < len(values):
        raise Wrong(f"it takes result {index!r} of a value that has {len(values) if isinstance(values, list | tuple) else 'one'}")
    return values[index]


def _compare(found: Value, declared: Record | tuple[Record, ...], sizes: Mapping[str, int]) -> None:
    if isinstance(declared, tuple) and isinstance(found, list | tuple):
        if len(found) != len(declared):
            raise Wrong(f"its operator gives {len(found)} results, {len(declared)} are declared")
        for one, record in zip(found, declared, strict=True):
            _compare(one, record, sizes)
        return
    if isinstance(declared, tuple) or isinstance(found, list | tuple):
        raise Wrong(f"its operator gives {_value_text(found)}, declared is {print_type(declared, sizes)}")
    fits = isinstance(found, Tensor) == (declared.dtype is not None)
    if not fits or isinstance(found, Tensor) and (tuple(found.shape) != tuple(declared.shape) or found.dtype != declared.dtype):
        local = "" if declared.sharding is None else f", {list(declared.shape)} on a rank"
        raise Wrong(f"its operator gives {_value_text(found)}, declared is {print_type(declared, sizes)}{local}")


def _value_text(found: Value) -> str:
    if isinstance(found, list | tuple):
        return f"({', '.join(map(_value_text, found))})"
    return print_type(Record(tuple(found.shape), found.dtype)) if isinstance(found, Tensor) else "int"


def _check_places(node: Node, values: Mapping[Node, Value]) -> None:
    """Raises Wrong for an integer that depends on the rank and may determine a shape: only pointwise operators and `PLACES` take one."""
    target = cast(OpOverload, node.target)
    if not any(type(values.get(operand)) is int for operand in node.all_input_nodes) or torch.Tag.pointwise in target.tags:
        return
    named = [(argument.name, value) for argument, value in zip(target._schema.arguments, node.args, strict=False)]
    for name, value in (*named, *node.kwargs.items()):
        operands = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(operand, Node) and type(values.get(operand)) is int for operand in operands):
            if target.namespace != "meshc" or name not in PLACES:
                raise Wrong(f"its {name} is a number that depends on the rank, where its operator takes one that all ranks share")


def _roots(node: Node, roots: Mapping[Node, frozenset[str]]) -> frozenset[str]:
    """Keys of the stage's inputs that a value may share memory with, as a view of them."""
    if node.op != "call_function" or not may_view(node.target):
        return frozenset()
    return frozenset(key for operand in node.all_input_nodes for key in roots[operand])


def may_view(target: Target) -> bool:
    """Whether an operator's result may share memory with its operands."""
    if spmd.is_host_copy(target):
        return False
    if target in FUNCTIONS.values():
        return True  # a single tile, a mask of no padding, a group of one rank
    schema = cast(OpOverload, target)._schema
    return target in RESHAPES or any(argument.alias_info is not None for argument in schema.arguments)


def _check_writes(node: Node, roots: Mapping[Node, frozenset[str]]) -> None:
    """Raises Wrong for writes by operators other than `WRITERS`, into inputs that the program does not own, or twice into one value."""
    schema = node.target._schema  # type: ignore[union-attr]
    if not schema.is_mutable:
        return
    if node.target not in WRITERS:
        raise Wrong("it writes into its operands")
    written = writes(node)
    for operand in written:
        foreign = sorted(key for key in roots.get(operand, ()) if kind_of(key) not in OWN)
        if foreign:
            raise Wrong(f"it writes into {operand}, in the memory of {foreign[0]}, which is no parameter, buffer or state of the program")
    if len(set(written)) != len(written):
        raise Wrong("it writes into one value twice")
