"""What one operator of a per-rank program takes: a roofline over its local shapes.

    seconds = max(flops / rate of its dtype + product_moves * moving, moving) + launch
    moving  = bytes read and written / memory bandwidth

Operands and results are each read or written once: what a composite operator (attention, an optimizer's update of all parameters) makes
inside is not memory traffic of its own. Views and integers take nothing. In a compiled region, lines whose values are made for one another
are one kernel (`fused.py`): what is between them is not moved, and only the last is launched. Williams, Waterman, Patterson: Roofline (CACM
52(4), 2009). On a CPU a product does not multiply while it brings its operands into the order in which it does (Goto, van de Geijn: Anatomy
of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008): thin ones, which multiply little by what they move, are slower by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch.fx import Node

from meshc import ir
from meshc.cost.devices import Device
from meshc.cost.flops import COUNTS, flops
from meshc.cost.fused import is_fused
from meshc.ir import spmd
from meshc.ops.attention_spans import spans
from meshc.program import packing

GATHERS: Final[Mapping[str, int]] = {
    "aten.embedding": 0, "aten.index_select": 0, "aten.gather": 0, "aten.index.Tensor": 0, "meshc.take": 0,
}  # fmt: skip
"""Operators that read of this operand as many elements as they make."""

MAKE_NOTHING: Final = ("aten.empty.memory_format", "aten.empty_like", "aten.new_empty", "aten.empty_permuted", "aten.empty_strided")

ATTENTION: Final = ("meshc.attention", "meshc.attention_backward")


@dataclass(frozen=True, slots=True)
class Price:
    """What an operator takes, and would take if those of its values that grow had `times` their size.

    work_s   of its multiplications and additions; they grow if any of its values does
    fixed_s  of moving the values that do not grow;  grown_s  of those that do
    apart    how often they are moved while nothing is multiplied
    """

    work_s: float = 0.0
    fixed_s: float = 0.0
    grown_s: float = 0.0
    launch_s: float = 0.0
    grows: bool = False
    apart: float = 0.0

    def seconds(self, times: float = 1.0) -> float:
        moving_s = self.fixed_s + self.grown_s * times
        return max(self.work_s * (times if self.grows else 1.0) + self.apart * moving_s, moving_s) + self.launch_s


FREE: Final = Price()

Grows: TypeAlias = Callable[[Node, int], bool]
"""Whether a result of a node grows."""


def seconds(node: Node, device: Device) -> float:
    """Predicted seconds of one node of a per-rank graph on a rank; 0 for what runs nothing, for collectives and copies (`cost.links`)."""
    return price(node, device).seconds()


def price(node: Node, device: Device, grows: Grows = lambda node, index: False) -> Price:
    """The same, by what of it grows."""
    if node.op != "call_function" or ir.is_getitem(node) or not _runs(node):
        return FREE
    if spmd.is_collective(node.target) or spmd.is_host_copy(node.target):
        return FREE
    rate = device.rate(_dtype(node), attention=ir.op_name(node) in ATTENTION)
    fixed, grown = _moved(node, grows)
    launch_s = 0.0 if is_fused(node) else device.launch_s
    values = (*map(ir.value_of, ir.operands(node)), *((node, index) for index in range(len(ir.records(node)))))
    work_s, bytes_per_s = _work(node, device) / rate, device.bytes_per_s
    grown_any = any(grows(*value) for value in values)
    return Price(work_s, fixed / bytes_per_s, grown / bytes_per_s, launch_s, grown_any, product_moves(node, device))


def product_moves(node: Node, device: Device) -> float:
    """How often a product moves its operands and results while it does not multiply; 0 for other operators."""
    return device.product_moves if ir.op_name(node) in COUNTS and ir.op_name(node) not in ATTENTION else 0.0


def moved_bytes(node: Node) -> float:
    """Bytes that one node's operator reads and writes in memory."""
    return sum(_moved(node, lambda node, index: False))


def _moved(node: Node, grows: Grows) -> tuple[float, float]:
    """Bytes that are read and written: of values that do not grow, and of those that do."""
    written = _overwritten(node)
    name = ir.op_name(node)
    made = [] if written or name in MAKE_NOTHING else list(map(ir.local_bytes, ir.records(node)))
    moved = {False: 0.0, True: 0.0}
    for index, size in enumerate([] if is_fused(node) else made):
        moved[grows(node, index)] += size
    picked = ir.operands(node)[GATHERS[name]] if name in GATHERS else None
    for operand in dict.fromkeys(ir.operands(node)):
        if operand is picked:  # as many rows as are made
            moved[grows(node, 0)] += min(sum(made), _read_bytes(operand))
        else:
            moved[grows(*ir.value_of(operand))] += _read_bytes(operand)
    for operand in written:
        moved[grows(*ir.value_of(operand))] += _bytes(operand)
    return moved[False], moved[True]


def _runs(node: Node) -> bool:
    """Whether a node makes a rank do anything beyond arithmetic with integers and looking at memory in another way."""
    if _overwritten(node):
        return True
    return not (packing.is_view(node) or all(one.dtype is None for one in ir.records(node)))


def _overwritten(node: Node) -> list[Node]:
    """The operands that an operator writes into."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[Node] = []
    for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += given if isinstance(given, list | tuple) else [given]  # type: ignore[list-item]
    return found


def _bytes(value: Node) -> int:
    producer, index = ir.value_of(value)
    return ir.local_bytes(ir.records(producer)[index]) if ir.has_record(producer) else 0


def _read_bytes(value: Node) -> int:
    """Bytes behind an operand: of an expanded view no more than what it looks at, of what is never in memory none."""
    size = _bytes(value)
    while packing.is_view(value) and not ir.is_getitem(value):
        value = value.all_input_nodes[0]
        size = min(size, _bytes(value))
    return 0 if is_fused(value) else size


def _dtype(node: Node) -> torch.dtype:
    """In which an operator computes: its first operand's, or else its result's."""
    for value in (*ir.operands(node), node):
        producer, index = ir.value_of(value)
        found = ir.records(producer)[index].dtype if ir.has_record(producer) else None
        if found is not None and found.is_floating_point:
            return found
    return torch.float32


def _work(node: Node, device: Device) -> float:
    count = flops(node)
    return count * _seen(node, device.attention_keys) if count and ir.op_name(node) in ATTENTION else count


def _seen(attention: Node, block: int) -> float:
    """The part of the scores that attention's kernels compute, which go through `block` keys at once; a mask that is given as a tensor
    leaves nothing out.

    Where the tile of the queries begins differs by rank: the last one sees most, and the others wait for it.
    """
    schema = attention.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given.update({argument.name: value for argument, value in zip(schema, attention.args, strict=False)}, **attention.kwargs)
    queries, keys = ir.record(given["q"]).shape[2], ir.record(given["k"]).shape[2]
    if not given["causal"] or not queries * keys:
        return 1.0
    start = max(0, keys - queries - given["offset"]) if isinstance(given["start"], Node) else given["start"]
    seen = 0.0
    for rows, parts in spans(queries, keys, given["window"], given["offset"] + start):
        for part in parts:
            wide = part.keys.stop - part.keys.start
            seen += (rows.stop - rows.start) * (min(wide, (wide + block) / 2) if part.how == "causal" else wide)
    return seen / (queries * keys)
