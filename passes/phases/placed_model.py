"""The placed phase: the global view with its factors, the plan's pins, and in the end every value's sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from torch.fx import Graph, Node

from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import AxisChoices, Directive
from meshc.passes.phases.chunked_head import ChunkedHead
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Factors, Value
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import Joint, TracedModel

Slots = Mapping[tuple[int, int], tuple[str, ...]]
"""(dim, position) -> axes; empty: the factor stays whole."""


@dataclass(frozen=True)
class Pins:
    """The plan's lines about tensors, resolved.

    values   from pins: axes of values where they are computed
    storage  from pins: axes of stored parameters, with gradients and state
    spread   from pins that are not `only`: axes of whole factor classes
    stored   from store lines, by name and kind (parameter, gradient, state): axes of storage, beyond `storage`
    operators  from operator pins: their axis assignments
    """

    values: Mapping[Value, Slots] = field(default_factory=dict)
    storage: Mapping[str, Slots] = field(default_factory=dict)
    spread: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    stored: Mapping[tuple[str, str], Slots] = field(default_factory=dict)
    operators: Mapping[Node, Directive] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlacedModel(CompilationPhase):
    """
    traced      the traced model that was placed
    joint       the operator graph, immutable from here on: factors and assignment refer to its nodes
    view        the global view of the whole model, where `joint` has a few of its layers only
    pins        from `annotate` on
    choices     a search's decisions for axes that the plan leaves open, for `propagate`
    chunked     from `propagate` on: the head and loss that run in chunks, if any
    assignment  from `propagate` on; ports have shardings from `lay_ports` on
    """

    traced: TracedModel
    joint: Joint
    view: Callable[[], Joint]
    factors: Factors
    names: FactorNames
    pins: Pins = Pins()
    choices: AxisChoices | None = None
    chunked: ChunkedHead | None = None
    assignment: Assignment | None = None

    @property
    def graph(self) -> Graph:
        return self.joint.graph

    def require_assignment(self) -> Assignment:
        """The assignment, which exists from `propagate` on."""
        assert self.assignment is not None, "propagate has not run"
        return self.assignment

    def with_optimizer(self, optimizer: OptimizerSpec | None) -> Self:
        return replace(super().with_optimizer(optimizer), traced=self.traced.with_optimizer(optimizer))

    def restart_for_request(self, request: Request) -> Self:
        """The phase as `factorize` left it, under another request, for the passes after it: their own results are dropped."""
        return replace(self.with_request(request), pins=Pins(), chunked=None, assignment=None)
