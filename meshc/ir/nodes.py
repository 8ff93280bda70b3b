"""Records of FX graph nodes: one frozen `Record` per value, with its shape, dtype, sharding, source and phase.

`torch.fx` carries the graph. A node's record holds the value's shape and dtype, its sharding, the place in the user's model that it comes
from (source), and why it is so sharded (reason). Nodes with several results have a record per result and are read by `getitem`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from meshc.ir.likeness import like
from meshc.ir.sharding import Sharding
from meshc.ir.storage_moves import OPERATORS, Storage

KEY = "meshc"
PHASES = ("forward", "backward", "update")
"""Phases of a training step; a value belongs to one."""


@dataclass(frozen=True)
class Source:
    """A place in the user's model: file, line, the code there, and the module path (`model.layers.0.mlp`).

    `region` names the checkpointed region (`torch.utils.checkpoint`) around the place, and `saved` says that the region's own policy saves
    the value: both are for passes alone.
    """

    file: str = ""
    line: int = 0
    code: str = ""
    module: str = ""
    region: str = ""
    saved: bool = False

    @property
    def place(self) -> str:
        """`model.py:15`; "" if it is not known."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.place, self.module)))


@dataclass(frozen=True)
class Record:
    """One value of a graph. `shape` is global before `partition` and local after it; `sharding` is always of the global value.

    `dtype` is None for a value that is no tensor (a coordinate, a tile's start). `phase` is forward, backward or update. `of` names the
    global-view value that a per-rank value is a form of (`mm_3`, `split.1`). `returned_by` are the paths of the modules that return it, in
    the global view. `storage`: where the value is stored; on the host, `from_host` and host operators alone read it (`storage_moves.py`).
    `chunk` is the number of the chunk of tokens for which the head and loss compute the value. `again`: a recomputation, in backward, of a
    value of forward. `used`: the dim whose number of positions is data (`used_rows_dims.py`); `shape` has their bound.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    sharding: Sharding | None = None
    source: Source = Source()
    reason: str = ""
    phase: str = "forward"
    of: str = ""
    returned_by: tuple[str, ...] = ()
    storage: Storage = "device"
    chunk: int | None = None
    again: bool = False
    used: int | None = None


def local_bytes(record: Record) -> int:
    """Bytes of a per-rank value."""
    return prod(record.shape) * record.dtype.itemsize if record.dtype is not None else 0


def has_record(node: Node) -> bool:
    return KEY in node.meta


def is_integer(node: Node) -> bool:
    """Whether a call's value is no tensor but an integer: a coordinate, a tile's start or count."""
    found = node.meta[KEY]
    return not isinstance(found, tuple) and found.dtype is None


def record(node: Node) -> Record:
    """The record of a node that makes one value."""
    found = node.meta[KEY]
    if isinstance(found, tuple):
        raise TypeError(f"{node.name} makes {len(found)} values; read them through getitem")
    return found


def records(node: Node) -> tuple[Record, ...]:
    """The records of all results of a node (one for a plain node)."""
    found = node.meta[KEY]
    return found if isinstance(found, tuple) else (found,)


def set_record(node: Node, value: Record | tuple[Record, ...]) -> None:
    node.meta[KEY] = value


def update(node: Node, **changes: Any) -> None:
    """Replace fields of the records of all results of a node."""
    found = node.meta[KEY]
    node.meta[KEY] = tuple(like(one, **changes) for one in found) if isinstance(found, tuple) else like(found, **changes)


def phase_of(node: Node) -> str:
    """The phase of a call; "" for other nodes, and for calls without a result."""
    return records(node)[0].phase if node.op == "call_function" and node.meta.get(KEY) else ""


def is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def value_of(node: Node) -> tuple[Node, int]:
    """The (producer, result index) of a node, looking through getitem."""
    if is_getitem(node):
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def leaves(argument: object) -> Iterator[object]:
    """The leaves of a call's argument, in order: lists, tuples and dicts are flattened."""
    if isinstance(argument, list | tuple):
        for item in argument:
            yield from leaves(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from leaves(item)
    else:
        yield argument


def comparison_key(argument: object) -> object:
    """A hashable form of an argument, or of several, that keeps 1, 1.0 and True apart, which compare equal."""
    if isinstance(argument, list | tuple):
        return list if isinstance(argument, list) else tuple, *map(comparison_key, argument)
    if isinstance(argument, dict):
        return dict, *((name, comparison_key(argument[name])) for name in sorted(argument))
    if isinstance(argument, float):
        return float, argument if argument else repr(argument)
    return (argument.__class__, argument) if isinstance(argument, int) else argument


def operands(node: Node) -> list[Node]:
    """Nodes among the arguments, in order, with repetitions, lists flattened."""
    return [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]


def is_tensor(node: Node) -> bool:
    """Whether the node makes exactly one tensor."""
    found = node.meta.get(KEY)
    return isinstance(found, Record) and found.dtype is not None


def calls(graph: Graph) -> Iterator[Node]:
    """All call_function nodes except getitem, in order."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            yield node


def calls_of(graph: Graph, phase: str) -> list[Node]:
    """All call_function nodes of a phase, getitem too, in order."""
    return [node for node in graph.nodes if phase_of(node) == phase]


def op_name(node: Node) -> str:
    """`aten.mm` for `torch.ops.aten.mm.default`, `aten.add.Tensor` for other overloads, the function's name otherwise."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _op_name(target)
    return getattr(target, "__name__", str(target))


@cache
def _op_name(target: torch._ops.OpOverload) -> str:
    return str(target).removesuffix(".default")


def runs_on_host(node: Node) -> bool:
    """Whether an operator reads values stored on the host: it runs there, and so is its result stored there. False for copies."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") in OPERATORS:
        return False
    return any(one.storage != "device" for operand in node.all_input_nodes if has_record(operand) for one in records(operand))
