"""What plans call operators: by the module that calls them, the phase, what they are, and which of those.

    model.layers.0.mlp.up_proj/forward/mm      model.layers.0.mlp.up_proj/backward/mm.2

The first of several is called by its operator's name alone. An operator has a name if a plan has something to say of it: layouts follow
what they lay out, values of integers alone are made where they are used, updates go by the state, and what has no rule runs whole. Names go
by no number of a graph, and those of a layer not by how many layers were captured.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from meshc.ir import is_getitem, op_name, records
from meshc.ir.graph import placeholders
from meshc.passes.phases.factors import Instance
from meshc.passes.phases.placed import Placed

FREE = ("constant", "random", "buffer", "number")
"""Kinds of ports that no parameter and no floating input goes into."""


def named_operators(placed: Placed) -> dict[str, Instance]:
    """By name, in graph order."""
    free = {
        node for port, node in zip(placed.joint.inputs, placeholders(placed.graph), strict=True)
        if port.kind in FREE or (port.kind == "input" and not (port.dtype.is_floating_point or port.dtype.is_complex))
    }  # fmt: skip
    found: dict[str, Instance] = {}
    count: Counter[str] = Counter()
    for node in placed.graph.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        instance = placed.factors.instances[node]
        updates = node in placed.joint.updates
        if not updates and not instance.rule.accumulates and all(value[0] in free for value in instance.values):
            free.add(node)
        elif not updates and instance.kind not in ("layout", "unknown"):
            name = _name(node)
            count[name] += 1
            found[name if count[name] == 1 else f"{name}.{count[name]}"] = instance
    return found


def _name(node: Node) -> str:
    record = records(node)[0]
    return f"{record.source.module}/{record.phase}/{_short(node)}"


def _short(node: Node) -> str:
    """`mm` of `aten.mm`, `add` of `aten.add.Tensor`."""
    parts = op_name(node).split(".")
    return parts[1] if len(parts) > 1 else parts[0]
