"""Traced: the model as graphs, for one device. No rank and no plan is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch.fx import Graph, Node

from meshc.frontend.capture import TorchGraph
from meshc.ir.graph import copy_into, placeholders, results_of
from meshc.ir.sizes import Dynamic
from meshc.passes.phases.outset import Outset
from meshc.passes.phases.request import Request
from meshc.program.program import Port


@dataclass(frozen=True)
class Joint:
    """The graph of operators over the global view, with its backward and its update; what each placeholder and each result is.

    inputs, outputs  in the order of placeholders and results
    updates          nodes that update a parameter -> its name
    """

    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    updates: Mapping[Node, str] = field(default_factory=dict)

    def placeholders(self) -> dict[str, Node]:
        """Placeholder of each input port, by key."""
        return {port.key: node for port, node in zip(self.inputs, placeholders(self.graph), strict=True)}

    def results(self) -> list[Node]:
        return list(results_of(self.graph))

    def copied(self) -> Joint:
        """The same with a graph of its own."""
        graph, made = Graph(), dict[Node, Node]()
        graph.output(copy_into(graph, self.graph, made))
        return replace(self, graph=graph, updates={made[node]: name for node, name in self.updates.items()})


@dataclass(frozen=True, kw_only=True)
class Traced(Outset):
    """
    model        torch's graph of the model: calls as the model wrote them
    joint        the graph of operators, from `differentiate` on
    dynamic      sizes that calls choose
    constraints  what they must satisfy, as text
    """

    model: TorchGraph
    joint: Joint | None = None
    dynamic: tuple[Dynamic, ...] = ()
    constraints: tuple[str, ...] = ()

    def operators(self) -> Joint:
        """The graph of operators; there is one from `differentiate` on."""
        assert self.joint is not None, "differentiate has not run"
        return self.joint

    def beside(self, request: Request) -> Self:
        """The same under another request, with a graph of operators of its own: passes write into the one that they are given."""
        return replace(self.asked(request), joint=self.operators().copied())
