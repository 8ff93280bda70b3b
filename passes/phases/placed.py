"""Placed: the global view with its factors; in the end it is decided for every value who splits what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from torch.fx import Graph, Node

from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import Choices, Directed
from meshc.passes.phases.chunked import Chunked
from meshc.passes.phases.factors import Factors, Value
from meshc.passes.phases.later import Later
from meshc.passes.phases.names import Names
from meshc.passes.phases.outset import Outset
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced import Joint, Traced

Slots = Mapping[tuple[int, int], tuple[str, ...]]
"""(dim, position) -> axes; none: the factor stays whole."""


@dataclass(frozen=True)
class Pins:
    """What the plan's lines about tensors hold.

    values   of pins: where values are computed
    storage  of pins: where parameters are stored, with gradients and state
    spread   of pins that are not `only`: whole classes
    stored   of store lines: where each of a parameter, its gradient and its state lies, by name and kind; over and above `storage`
    operators  of pins of operators: what these are told
    """

    values: Mapping[Value, Slots] = field(default_factory=dict)
    storage: Mapping[str, Slots] = field(default_factory=dict)
    spread: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    stored: Mapping[tuple[str, str], Slots] = field(default_factory=dict)
    operators: Mapping[Node, Directed] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Placed(Outset):
    """
    traced      what was placed
    joint       its graph of operators, which nothing changes any more: factors and assignment refer to its nodes
    view        the global view of the whole model, where `joint` is that of a few of its layers
    pins        from `annotate` on
    choices     what a search has decided of axes that the plan leaves open, for `propagate`
    chunked     from `propagate` on: what runs in chunks, if anything does
    assignment  from `propagate` on; ports say how they lie from `lay_ports` on
    """

    traced: Traced
    joint: Joint
    view: Later[Joint]
    factors: Factors
    names: Names
    pins: Pins = Pins()
    choices: Choices | None = None
    chunked: Chunked | None = None
    assignment: Assignment | None = None

    @property
    def graph(self) -> Graph:
        return self.joint.graph

    def decided(self) -> Assignment:
        """How every value lies; that is known from `propagate` on."""
        assert self.assignment is not None, "propagate has not run"
        return self.assignment

    def updating(self, optimizer: OptimizerSpec | None) -> Self:
        return replace(super().updating(optimizer), traced=self.traced.updating(optimizer))

    def again(self, request: Request) -> Self:
        """What `factorize` left, for the passes after it under another request: of their own they keep nothing in it."""
        return replace(self.asked(request), pins=Pins(), chunked=None, assignment=None)
