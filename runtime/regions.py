"""Stages with their compute compiled by Inductor: maximal regions between collectives, each one compiled function.

A node's level counts the collectives behind it. All nodes of a level form one region, then the collectives that they feed start, and the
next region waits for those that it reads. Updates in place and what depends on the microbatch's number stay outside, as plain calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from meshc import spmd
from meshc.program import Stage
from meshc.runtime import codegen
from meshc.runtime.groups import Groups


def _outside(node: Node, known: Mapping[Node, int], varying: set[Node]) -> bool:
    if any(operand in varying and operand.target in spmd.INTEGERS.values() for operand in node.all_input_nodes):
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def levels(stage: Stage, known: Mapping[Node, int]) -> dict[Node, int]:
    """Region number of each node; nodes that stay outside, and collectives, stand between two regions."""
    integer_varies = {
        node for node in stage.graph.nodes if node.op == "call_function" and node.target in spmd.INTEGERS.values() and node not in known
    }
    found: dict[Node, int] = {}
    for node in stage.graph.nodes:
        if node.op == "placeholder" or node in known or node in integer_varies:
            found[node] = 0
            continue
        level = 0
        for operand in node.all_input_nodes:
            between = operand.op == "call_function" and (spmd.is_collective(operand.target) or _outside(operand, known, integer_varies))
            level = max(level, found[operand] + between)
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            level = max([level, *found.values()])
        found[node] = level
    return found


def compile_regions(
    stage: Stage,
    groups: Groups,
    coordinates: Mapping[str, int],
    device: torch.device,
    here: Callable[[str], None] | None = None,
) -> Callable[..., list[Any]]:
    """The same function as `codegen.generate` gives, its regions compiled at their first call."""
    known = codegen.integers(stage, coordinates)
    varying = {n for n in stage.graph.nodes if n.op == "call_function" and n.target in spmd.INTEGERS.values() and n not in known}
    level = levels(stage, known)
    (output,) = stage.graph.find_nodes(op="output")
    outer = Graph()
    env: dict[Node, Node] = {}
    for node in stage.graph.find_nodes(op="placeholder"):
        env[node] = outer.placeholder(node.name)
    for node in stage.graph.nodes:
        if node in varying:
            env[node] = outer.call_function(node.target, torch.fx.node.map_arg(node.args, lambda n: known[n] if n in known else env[n]))
    for number in range(max(level.values(), default=0) + 1):
        inside = [n for n in stage.graph.nodes if n.op == "call_function" and level[n] == number and n not in known and n not in varying]
        region = [n for n in inside if not spmd.is_collective(n.target) and not _outside(n, known, varying)]
        if region:
            _add_region(outer, env, region, known, device)
        for node in inside:
            if node not in region:
                env[node] = outer.call_function(
                    node.target,
                    torch.fx.node.map_arg(node.args, lambda n: known[n] if n in known else env[n]),
                    torch.fx.node.map_arg(node.kwargs, lambda n: env[n]),
                )
    outer.output(torch.fx.node.map_arg(output.args[0], lambda n: env[n]))
    return codegen.generate(Stage(stage.name, outer, stage.inputs, stage.outputs), groups, coordinates, device, here)


def _add_region(outer: Graph, env: dict[Node, Node], region: list[Node], known: Mapping[Node, int], device: torch.device) -> None:
    members = set(region)
    inner = Graph()
    copies: dict[Node, Node] = {}
    inputs: list[Node] = []
    for node in region:
        for operand in node.all_input_nodes:
            if operand not in members and operand not in known and operand not in copies:
                copies[operand] = inner.placeholder(operand.name)
                inputs.append(operand)
    for node in region:
        kwargs = {key: codegen._moved(key, value, device) for key, value in node.kwargs.items()}
        copies[node] = inner.call_function(
            node.target,  # type: ignore[arg-type]
            torch.fx.node.map_arg(node.args, lambda n: known[n] if n in known else copies[n]),
            torch.fx.node.map_arg(kwargs, lambda n: copies[n]),
        )
    results = [n for n in region if any(user not in members for user in n.users) and not _is_tuple(n)]
    inner.output(tuple(copies[n] for n in results))
    call = outer.call_function(_Region(GraphModule(torch.nn.Module(), inner)), tuple(env[n] for n in inputs))
    for index, node in enumerate(results):
        env[node] = outer.call_function(operator.getitem, (call, index))


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("meshc"), tuple)


class _Region:
    """A region, compiled for the first inputs that it sees."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.compiled: Callable[..., Any] | None = None
        self.__name__ = "region"

    def __call__(self, *inputs: Any) -> Any:
        if self.compiled is None:
            self.compiled = torch._inductor.compile(self.module, list(inputs))
        return self.compiled(*inputs)
