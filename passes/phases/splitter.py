"""A part of a graph copied as a stage of its own; the graph is left as it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch.fx import Graph, Node

from meshc.ir.graph import add_placeholder, ancestors_of, copied_node
from meshc.program.program import Stage


def split_stage(
    name: str, keys: Mapping[Node, str], results: Mapping[str, Node], given: Mapping[Node, str] = MappingProxyType({})
) -> Stage:  # fmt: skip
    """The part of a graph that computes `results` (by key). `keys`: of the graph's placeholders; `given`: further nodes that are inputs."""
    needed = sorted(ancestors_of(results.values(), through=lambda node: node not in given))
    inputs = {node: given.get(node) or keys[node] for node in needed if node.op == "placeholder" or node in given}
    copy = Graph()
    env = {node: add_placeholder(copy, node) for node in inputs}
    for node in needed:
        if node not in env:
            env[node] = copied_node(copy, node, env.__getitem__)
    copy.output(tuple(env[node] for node in results.values()))
    return Stage(name, copy, tuple(inputs.values()), tuple(results))
