"""Names of operators in plans: module path, phase, operator, and a number from the second one on.

    model.layers.0.mlp.up_proj/forward/mm      model.layers.0.mlp.up_proj/backward/mm.2

The first of several is called by its operator's name alone. An operator has a name if a plan can decide something for it: layouts follow
their operand, values of integers alone are computed where they are used, updates follow the state, and operators without rule run whole.

Names depend on no numbering of a graph and on no number of layers. So code that runs once for each layer is not named by the list's owner:

    model.layers.0.mlp/backward/add                   a sum of gradients of one value, the last of them that module's
    model.layers.0.mlp.up_proj.weight/update/add      the parameter's part of the gradient norm
    model.layers.0/forward/add                        code of `model` that reads the result of each layer
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

from torch.fx import Node

from meshc.ir import calls, is_getitem, op_name, records
from meshc.ir.graph import placeholders
from meshc.passes.phases.factors import Instance
from meshc.passes.phases.placed_model import PlacedModel
from meshc.program.program import Port

HELD = ("parameter", "buffer", "state")
"""Kinds of ports that belong to a module."""
_LAYER = re.compile(r"(?:(?!\d+(?:\.|$))[^.]+\.)*\d+(?=\.|$)")


def named_operators(placed: PlacedModel) -> dict[str, Instance]:
    """Operators by name, in graph order."""
    named = list(_nameable_operators(placed))
    callers = _callers(placed, named)
    found: dict[str, Instance] = {}
    count: Counter[str] = Counter()
    for instance in named:
        name = f"{callers[instance.node]}/{_kind(instance.node)}"
        count[name] += 1
        found[name if count[name] == 1 else f"{name}.{count[name]}"] = instance
    return found


def is_free(port: Port) -> bool:
    """Whether a port depends on no parameter and no floating input."""
    integers = port.kind == "input" and not (port.dtype.is_floating_point or port.dtype.is_complex)
    return integers or port.kind in ("constant", "random", "buffer", "number")


def _nameable_operators(placed: PlacedModel) -> Iterator[Instance]:
    """The operators that have names, in graph order."""
    free = {node for port, node in zip(placed.joint.inputs, placeholders(placed.graph), strict=True) if is_free(port)}
    for node in calls(placed.graph):
        instance = placed.factors.instances[node]
        updates = node in placed.joint.updates
        if not updates and not instance.rule.accumulates and all(value[0] in free for value in instance.values):
            free.add(node)
        elif not updates and instance.kind not in ("layout", "unknown"):
            yield instance


def _kind(node: Node) -> str:
    """`forward/mm` of `aten.mm`, `backward/add` of `aten.add.Tensor`."""
    parts = op_name(node).split(".")
    return f"{records(node)[0].phase}/{parts[1] if len(parts) > 1 else parts[0]}"


# ------------------------------------------------------------------------------------------------------------------------- who calls


def _callers(placed: PlacedModel, named: Sequence[Instance]) -> dict[Node, str]:
    """The first part of each name: the module that calls the operator; the layer, for code that runs for each of several; for sums that no
    module computes, the module or parameter of the last summand."""
    places = _places(placed)
    found: dict[Node, str] = {}
    several: dict[tuple[str, str, str], dict[Node, str]] = defaultdict(dict)
    for instance in named:
        node = instance.node
        module = found[node] = records(node)[0].source.module
        if _adds_up(node):
            found[node] = places[node]
        elif layer := _layer(module, places[node]):
            several[module, _kind(node), layer.rpartition(".")[0]][node] = layer
    for each in several.values():
        found |= each if len({*each.values()}) > 1 else {}
    return found


def _places(placed: PlacedModel) -> dict[Node, str]:
    """The module of each node, or the parameter that it updates; for sums that no module computes, and for code of a list's owner, that of
    the last operand."""
    ports = zip(placeholders(placed.graph), placed.joint.inputs, strict=True)
    found = {node: port.of or port.name for node, port in ports if port.kind in HELD}
    for node in placed.graph.nodes:
        if node in placed.joint.updates:
            found[node] = placed.joint.updates[node]
        elif node.op == "call_function":
            module = records(node)[0].source.module
            read = [found[operand] for operand in reversed(node.all_input_nodes) if operand in found]
            if not is_getitem(node) and not _adds_up(node):
                read = [_layer(module, place) for place in read]
            found[node] = next(filter(None, read), module)
    return found


def _adds_up(node: Node) -> bool:
    """Whether a node is a sum that no module computes: gradients of one value, squares for the norm."""
    return _kind(node) in ("backward/add", "update/add") and len(node.all_input_nodes) > 1 and not records(node)[0].source.module


@lru_cache(maxsize=1 << 14)
def _layer(module: str, place: str) -> str:
    """The layer of a list in `module` that contains `place`; "" if there is none."""
    start = len(module) + 1 if module else 0
    if module and not place.startswith(f"{module}."):
        return ""
    found = _LAYER.match(place, start)
    return place[: found.end()] if found else ""
