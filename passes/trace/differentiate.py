"""Differentiate: the operator graph with backward and loss, numbered draws of microbatches, and counts of experts."""

from __future__ import annotations

from dataclasses import replace

from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace import mean_of_parts
from meshc.passes.trace.close_loss import close_loss
from meshc.passes.trace.count_experts import count_experts
from meshc.passes.trace.joint_graph import joint_graph
from meshc.passes.trace.movable_experts import refuse_other_readers


def differentiate(traced: TracedModel) -> TracedModel:
    model = traced.model
    traced = replace(traced.with_notes(*model.notes), joint=joint_graph(model))
    if model.symbols is not None:
        dynamic, constraints = model.symbols.constraints(model.fake_mode.shape_env, traced.dynamic)
        traced = replace(traced, dynamic=dynamic, constraints=constraints)
    if traced.request.train:
        traced = close_loss(traced)
    if traced.parts is not None:
        joint = traced.operators()
        mean_of_parts.number_draws(joint.graph, traced.parts)
        mean_of_parts.mark_sums(joint, traced.parts.count)
    refuse_other_readers(traced.operators())
    return count_experts(traced) if traced.request.train else traced
