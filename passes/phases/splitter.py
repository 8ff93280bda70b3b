"""A part of a graph copied as a stage of its own; the graph is left as it is."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from meshc.ir.graph import add_placeholder, ancestors_of, copied_node
from meshc.program.program import Stage


class Splitter:
    def __init__(self, graph: Graph, keys: dict[Node, str]) -> None:
        self.graph, self.keys = graph, keys
        self._turn = {node: turn for turn, node in enumerate(graph.nodes)}

    def stage(self, name: str, results: Mapping[str, Node], given: Mapping[Node, str]) -> Stage:
        """The part of the graph that computes `results` (by key); `given` nodes are inputs (by key)."""
        needed = sorted(ancestors_of(results.values(), through=lambda node: node not in given), key=self._turn.__getitem__)
        copy = Graph()
        env: dict[Node, Node] = {}
        inputs: list[str] = []
        for node in needed:
            if node.op == "placeholder" or node in given:
                env[node] = add_placeholder(copy, node)
                inputs.append(given.get(node) or self.keys[node])
        for node in needed:
            if node not in env and node.op == "call_function":
                env[node] = copied_node(copy, node, env.__getitem__)
        copy.output(tuple(env[node] for node in results.values()))
        return Stage(name, copy, tuple(inputs), tuple(results))
