"""The traced phase: the model as graphs for one device, without ranks or plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch.fx import Graph, Node

from meshc.frontend.capture import TorchGraph
from meshc.ir.formats import Format
from meshc.ir.graph import copy_into, placeholders, results_of
from meshc.ir.sizes import Dynamic
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.request import Request
from meshc.plan.precision_lines import SparseLine
from meshc.program.program import Port, Stage


@dataclass(frozen=True)
class CompressionSide:
    """Where an operator on a compressed gradient computes. axis: over which it travels; home: whether on the axis's tile of the sum, or
    else on each rank's parts."""

    axis: str
    home: bool


@dataclass(frozen=True)
class Joint:
    """The operator graph over the global view, with its backward and its update, and the port of each placeholder and result.

    inputs, outputs  in the order of placeholders and results
    updates          nodes that update a parameter -> its name
    compressed       of these, nodes that compute on a gradient that travels in fewer bits
    """

    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    updates: Mapping[Node, str] = field(default_factory=dict)
    compressed: Mapping[Node, CompressionSide] = field(default_factory=dict)

    def as_stage(self, name: str = "traced") -> Stage:
        """The graph under the keys of its ports."""
        return Stage(name, self.graph, tuple(port.key for port in self.inputs), tuple(port.key for port in self.outputs))

    def placeholders(self) -> dict[str, Node]:
        """Placeholder of each input port, by key."""
        return {port.key: node for port, node in zip(self.inputs, placeholders(self.graph), strict=True)}

    def results(self) -> list[Node]:
        return list(results_of(self.graph))

    def copy(self) -> Joint:
        """The same with an independent graph."""
        graph, made = Graph(), dict[Node, Node]()
        graph.output(copy_into(graph, self.graph, made))
        updates = {made[node]: name for node, name in self.updates.items()}
        return replace(self, graph=graph, updates=updates, compressed={made[node]: side for node, side in self.compressed.items()})


@dataclass(frozen=True)
class SparseWeight:
    """Groups of a weight: `line.m` consecutive entries along `dim`, of which products read the `line.n` largest."""

    line: SparseLine
    dim: int

    def plain(self) -> list[int]:
        """n, m and dim, as a program has them beside its text."""
        return [self.line.n, self.line.m, self.dim]


@dataclass(frozen=True, kw_only=True)
class TracedModel(CompilationPhase):
    """
    model        torch's graph of the model: calls as the model wrote them
    joint        the graph of operators, from `differentiate` on
    dynamic      symbolic sizes that calls choose
    constraints  conditions on these sizes, as text
    precision    by parameter, the format of each product of forward that reads it, where the plan has set any; None: stays as it is
    open_formats by module with a product with a weight, whether the plan leaves its format open
    sparsity     by parameter, its groups, where the plan has products read the largest of each
    compressed   by parameter, how its gradient is compressed, where the plan says so
    """

    model: TorchGraph
    joint: Joint | None = None
    dynamic: tuple[Dynamic, ...] = ()
    constraints: tuple[str, ...] = ()
    precision: Mapping[str, Sequence[Format | None]] = field(default_factory=dict)
    open_formats: Mapping[str, bool] = field(default_factory=dict)
    sparsity: Mapping[str, SparseWeight] = field(default_factory=dict)
    compressed: Mapping[str, Any] = field(default_factory=dict)

    def operators(self) -> Joint:
        """The operator graph, which exists from `differentiate` on."""
        assert self.joint is not None, "differentiate has not run"
        return self.joint

    def copy_for_request(self, request: Request) -> Self:
        """The phase under another request, with an independent operator graph, since passes write into theirs."""
        return replace(self.with_request(request), joint=self.operators().copy())
