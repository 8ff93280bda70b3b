"""Faults of host, disk and device storage: an operator runs on the side that stores all its operands; only copies cross.

    m: "f32[8, 4] host" = "state:w/exp_avg"             or "f32[8, 4] disk": in a file there
    h: "f32[8, 4]" = aten.mul.Tensor(m, 2)             refused: the result is on the host, as m is
    h: "f32[8, 4]" = aten.mul.Tensor(x, m)             refused: m is on the host, and x on the device
    d: "f32[8, 4]" = from_host(m)
    back: "f32[8, 4] host" = to_host(h, m)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch.fx import Node

from meshc import ir
from meshc.ir import spmd
from meshc.ir.keys import Kind, is_a
from meshc.program.program import Stage
from meshc.text.allowed_operators import spelling

MAY: Final[tuple[Kind, ...]] = ("parameter", "state", "flow", "saved")
"""Kinds of keys under which a host value may enter or leave a stage."""


def faults(stage: Stage) -> Iterator[tuple[str, str]]:
    """(value, message) for every value in wrong storage. Assumes lines with correct types."""
    keys = stage.keys()
    over: dict[Node, Node] = {}
    for node in stage.graph.nodes:
        if node.op == "call_function" and (gone := next((one for one in node.all_input_nodes if one in over), None)) is not None:
            yield node.name, f"{node.name} = {spelling(node.target)}(...): it reads {gone}, and {over[gone]} above has copied over it"
        if spmd.is_host_copy(node.target):
            over |= dict.fromkeys(node.all_input_nodes[1:], node)
        if node.op == "placeholder" and ir.record(node).storage == "disk" and not is_a(keys[node], "state"):
            yield node.name, f"the parameter {node.name}: {keys[node]} cannot lie on the disk; state can"
        elif node.op == "placeholder" and ir.record(node).storage != "device" and not is_a(keys[node], *MAY):
            yield node.name, f"the parameter {node.name}: {keys[node]} cannot lie on the host; {', '.join(MAY)} can"
        if node.op == "call_function" and (why := _why_not(node)):
            yield node.name, f"{node.name} = {spelling(node.target)}(...): {why}"
    for key, value in stage.results().items():
        if isinstance(value, Node) and _is_on_host(value) and not is_a(key, *MAY):
            yield f"return {key}", f"{key} leaves as {value}, which lies on the host: from_host({value}) is on the device"


def _why_not(node: Node) -> str:
    if not spmd.is_host_copy(node.target):
        return _why_not_one_side(node)
    read, out = node.all_input_nodes, node.target is spmd.to_host
    if any(one.op != "placeholder" for one in read[1:]):
        return f"{read[1]} is no place to copy to: that is what enters the stage as state or a parameter"
    if _is_on_host(node) != out:
        return f"what it makes lies on the {'host, which its type does not say' if out else 'device, and its type says the host'}"
    if (disk := _is_on_disk(node)) != (out and len(read) > 1 and _is_on_disk(read[1])):
        return f"what it makes lies {'in memory, and its type says the disk' if disk else 'on the disk, which its type does not say'}"
    for operand, host in zip(read, (not out, out), strict=False):
        if _is_on_host(operand) != host:
            return f"it reads {operand}, which lies on the {'device' if host else 'host: from_host copies it to the device'}"
    return ""


def _why_not_one_side(node: Node) -> str:
    """Why an operator other than a copy mixes host and device; "" if it does not."""
    if any(map(_is_on_disk, (node, *node.all_input_nodes))):
        return "it reads what lies on the disk, or makes it: from_host and to_host alone do"
    read = [one for one in node.all_input_nodes if ir.has_record(one) and any(each.dtype is not None for each in ir.records(one))]
    there = [one for one in read if _is_on_host(one)]
    if there and (len(there) < len(read) or spmd.is_function(node.target)):
        return f"it reads {there[0]}, which lies on the host: from_host copies it to the device"
    if any(one.dtype is not None and (one.storage != "device") != bool(there) for one in ir.records(node)):
        return f"its type says that it lies on the {'device, and it runs on the host' if there else 'host, and it runs on the device'}"
    return ""


def _is_on_disk(node: Node) -> bool:
    return any(one.storage == "disk" for one in ir.records(node)) if ir.has_record(node) else False


def _is_on_host(node: Node) -> bool:
    return any(one.storage != "device" for one in ir.records(node)) if ir.has_record(node) else False
