"""A stage as one Python function: each node a line, collectives started where they stand and waited for where they are first used.

    v7 = f7(v5, v6)                # aten.mm
    v8 = all_reduce(v7, g8, 'sum') # starts
    v9 = f9(v1)                    # runs meanwhile
    v8 = v8.wait()
    v10 = f10(v8, v9); del v8, v9

Integers that stand for a rank's place are computed once, at load. The function is made from a checked graph; no text of a program is
executed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from meshc import spmd
from meshc.ops.implementations import direct
from meshc.program import Stage
from meshc.runtime import collectives
from meshc.runtime.groups import Groups

MICROBATCH = "mb"


def integers(stage: Stage, coordinates: Mapping[str, int]) -> dict[Node, int]:
    """Values of the integer nodes that do not depend on the microbatch."""
    found: dict[Node, int] = {}
    for node in stage.graph.nodes:
        if node.op != "call_function" or node.target not in spmd.INTEGERS.values():
            continue
        if node.target is spmd.coordinate:
            if node.args[0] in coordinates:
                found[node] = coordinates[node.args[0]]
        elif all(operand in found for operand in node.all_input_nodes):
            found[node] = node.target(*torch.fx.node.map_arg(node.args, lambda n: found[n]))
    return found


def starter(node: Node, groups: Groups) -> Callable[[torch.Tensor], collectives.Pending]:
    """A function that starts this node's collective on its operand."""
    group = groups.group(node.args[1])  # type: ignore[arg-type]
    name = node.target.__name__  # type: ignore[union-attr]
    rest = node.args[2:]
    if name == "all_reduce":
        how = rest[0]
        if _owned(node.args[0], node):  # type: ignore[arg-type]
            return lambda x: collectives.all_reduce(x, group, how, out=x if x.is_contiguous() else None)  # type: ignore[arg-type]
        return lambda x: collectives.all_reduce(x, group, how)  # type: ignore[arg-type]
    if name == "all_gather":
        return lambda x: collectives.gather_dim(x, rest[0], group)  # type: ignore[arg-type]
    if name == "reduce_scatter":
        return lambda x: collectives.scatter_dim(x, rest[0], group, rest[1])  # type: ignore[arg-type]
    return lambda x: collectives.all_to_all_dims(x, rest[0], rest[1], group)  # type: ignore[arg-type]


def _owned(operand: Node, user: Node) -> bool:
    """Whether `user` may overwrite its operand: freshly made memory that nothing else reads."""
    while True:
        if operand.op != "call_function" or set(operand.users) != {user}:
            return False
        target = operand.target
        if not isinstance(target, torch._ops.OpOverload):
            return False
        returns = target._schema.returns
        aliases = any(value.alias_info is not None for value in returns)
        if not aliases and target is not torch.ops.aten.reshape.default:
            return target.namespace == "aten" and len(returns) == 1
        if not operand.args or not isinstance(operand.args[0], Node):
            return False
        operand, user = operand.args[0], operand


class Source:
    """Lines of the function, and the objects that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}

    def bind(self, value: Any, prefix: str) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def literal(self, value: Any, env: Mapping[Node, str]) -> str:
        if isinstance(value, Node):
            return env[value]
        if isinstance(value, list):
            return "[" + ", ".join(self.literal(item, env) for item in value) + "]"
        if isinstance(value, tuple):
            return "(" + "".join(self.literal(item, env) + ", " for item in value) + ")"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self.bind(value, "c")

    def function(self, arguments: str) -> Callable[..., Any]:
        text = f"def run({arguments}):\n" + "".join(f"    {line}\n" for line in self.lines)
        scope = dict(self.names)
        exec(compile(text, "<meshc stage>", "exec"), scope)  # made above from a checked graph, with numbered names only
        made: Callable[..., Any] = scope["run"]
        return made


def generate(
    stage: Stage,
    groups: Groups,
    coordinates: Mapping[str, int],
    device: torch.device,
    here: Callable[[str], None] | None = None,
    where: Callable[[Node], Callable[..., Any]] | None = None,
) -> Callable[..., list[Any]]:
    """`run(inputs, mb)` -> outputs, for this rank. `here(name)` is told of each collective before it starts (for failure reports)."""
    known = integers(stage, coordinates)
    source = Source()
    env: dict[Node, str] = {}
    flying: set[Node] = set()
    last: dict[Node, Node] = {}
    for node in stage.graph.nodes:
        for operand in node.all_input_nodes:
            last[operand] = node
    dying: dict[Node, list[Node]] = defaultdict(list)
    for operand, node in last.items():
        dying[node].append(operand)
    placeholders = stage.graph.find_nodes(op="placeholder")
    for position, node in enumerate(placeholders):
        env[node] = f"v{position}"
    if placeholders:
        source.lines.append(", ".join(env[node] for node in placeholders) + ", = inputs; inputs.clear()")
    for number, node in enumerate(stage.graph.nodes):
        if node.op == "placeholder":
            continue
        if node in known:
            env[node] = repr(known[node])
            continue
        for operand in node.all_input_nodes:
            if operand in flying:
                source.lines.append(f"{env[operand]} = {env[operand]}.wait()")
                flying.discard(operand)
        if node.op == "output":
            source.lines.append("return " + source.literal(list(node.args[0]), env))
            break
        name = env[node] = f"w{number}"
        if node.target is spmd.coordinate:
            source.lines.append(f"{name} = mb")
            continue
        if spmd.is_collective(node.target):
            start = source.bind(starter(node, groups), "g")
            if here is not None:
                note = source.bind(here, "h")
                label = source.bind(f"{node.target.__name__}({', '.join(node.args[1])})", "c")
                source.lines.append(f"{note}({label})")
            source.lines.append(f"{name} = {start}({env[node.args[0]]})")
            flying.add(node)
        else:
            function = source.bind(direct(node.target, device) if where is None else where(node), "f")
            arguments = [source.literal(argument, env) for argument in node.args]
            arguments += [f"{key}={source.literal(_moved(key, value, device), env)}" for key, value in node.kwargs.items()]
            source.lines.append(f"{name} = {function}({', '.join(arguments)})")
        unread = [name] if not node.users else []
        dead = [env[operand] for operand in dying[node] if operand not in known and operand not in flying] + unread
        if dead:
            source.lines.append("del " + ", ".join(dict.fromkeys(dead)))
    return source.function("inputs, mb=0")


def _moved(key: str, value: Any, device: torch.device) -> Any:
    """Constants are traced for the CPU and made on the device that runs."""
    return device if key == "device" and value is not None else value
