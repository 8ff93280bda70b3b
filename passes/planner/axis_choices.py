"""Axis choices for `propagate`, from the option picked for each class."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from meshc.ir.sharding import Part, Sharding
from meshc.passes.phases.choices import AxisChoices
from meshc.passes.phases.factors import Token
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.planner.fold import DecisionClasses
from meshc.passes.planner.search_space import Axes, Decision, Option, SearchSpace


def axis_choices(placed: PlacedModel, space: SearchSpace, folded: DecisionClasses, pick: Sequence[int]) -> AxisChoices:
    tokens: dict[Node, dict[Token, Axes]] = {}
    deferred: dict[Node, Axes] = {}
    storage: dict[tuple[str, str], Sharding] = {}
    parameters = {port.name: node for port, node in zip(placed.joint.inputs, placed.graph.find_nodes(op="placeholder"), strict=True)}
    for key, decision in space.decisions.items():
        option = decision.options[pick[folded.of[key]]]
        if isinstance(key, tuple):
            kind, name = key
            lies = _stored_sharding(placed, parameters[name], decision, option)
            storage[(name, kind)] = lies
            if kind == "state" or not placed.joint.updates:
                storage[(name, "gradient")] = lies
                storage.setdefault((name, "state"), lies)
        elif key.op == "call_function":
            tokens[key] = {token: axes for token, axes in zip(decision.labels, option.axes, strict=True) if axes}  # type: ignore[misc]
            deferred[key] = option.deferred
    return AxisChoices(space.axes, tokens, deferred, storage)


def _stored_sharding(placed: PlacedModel, node: Node, decision: Decision, option: Option) -> Sharding:
    factors, names = placed.factors, placed.names
    whole = Sharding(tuple(tuple(Part(names.of[f], factors.size[f]) for f in row) for row in factors.dims[(node, 0)]))
    for (dim, position), axes in zip(decision.labels, option.axes, strict=True):
        if axes:
            whole = whole.with_axes(dim, position, axes)  # type: ignore[arg-type]
    return whole
