"""What one operator of a per-rank program takes: a roofline over its local shapes.

    seconds = max(flops / rate of its dtype, bytes read and written / memory bandwidth) + launch

Operands and results are each read or written once: what a composite operator (attention, an optimizer's update of all parameters) makes
inside is not memory traffic of its own. Views and integers take nothing. In a compiled region, lines whose values are made for one another
are one kernel (`fused.py`): what is between them is not moved, and only the last is launched. Williams, Waterman, Patterson: Roofline (CACM
52(4), 2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch.fx import Node

from meshc import ir
from meshc.cost.devices import Device
from meshc.cost.flops import flops
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


def seconds(node: Node, device: Device) -> float:
    """Predicted seconds of one node of a per-rank graph on a rank; 0 for what runs nothing, and for collectives (`cost.links`)."""
    if node.op != "call_function" or ir.is_getitem(node) or spmd.is_collective(node.target) or not _runs(node):
        return 0.0
    rate = device.rate(_dtype(node), attention=ir.op_name(node) in ATTENTION)
    launch_s = 0.0 if is_fused(node) else device.launch_s
    return max(_work(node, device) / rate, moved_bytes(node) / device.bytes_per_s) + launch_s


def moved_bytes(node: Node) -> float:
    """Bytes that one node's operator reads and writes in memory."""
    written = _overwritten(node)
    name = ir.op_name(node)
    made = 0 if written or name in MAKE_NOTHING else sum(map(ir.local_bytes, ir.records(node)))
    total = 0.0 if is_fused(node) else float(made)
    picked = ir.operands(node)[GATHERS[name]] if name in GATHERS else None
    for operand in dict.fromkeys(ir.operands(node)):
        total += min(made, _read_bytes(operand)) if operand is picked else _read_bytes(operand)
    return total + sum(_bytes(operand) for operand in written)


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
