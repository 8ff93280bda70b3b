"""Differentiate: the operator graph with backward and loss, numbered draws of microbatches, and counts of experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshc.errors import CompileError
from meshc.frontend.train_step import METRICS
from meshc.ir import Record
from meshc.ir.graph import call, placeholders, set_results
from meshc.ir.keys import is_a
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.trace import mean_of_parts
from meshc.passes.trace.count_experts import count_experts
from meshc.passes.trace.drop_unread import drop_unread
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


# Close loss: a step's graph without tangents and without gradients of inputs; results beside the loss become metrics.
#
# g = mul(tangent_loss, w)      becomes      one = full([], 1.0);  g = mul(one, w)


aten = torch.ops.aten


def close_loss(traced: TracedModel) -> TracedModel:
    """The loss's tangent becomes the constant 1, or a microbatch's share of a mean. Gradients of inputs and buffers are dropped."""
    joint = traced.operators()
    graph = joint.graph
    kept_inputs, kept_outputs, results = [], [], []
    for port, node in zip(joint.inputs, placeholders(graph), strict=True):
        if port.kind != "tangent":
            kept_inputs.append(port)
            continue
        made = Record((), port.dtype, phase="backward")
        share = 1.0 / (traced.parts.count if traced.parts is not None else 1)
        with graph.inserting_after(placeholders(graph)[-1]):
            one = call(graph, made, aten.full.default, [], share, dtype=port.dtype, device=torch.device("cpu"))
        node.replace_all_uses_with(one)
        graph.erase_node(node)
    for port, node in zip(joint.outputs, joint.results(), strict=True):
        if port.kind == "gradient" and is_a(port.name, "input", "buffer"):
            continue
        if port.kind == "output" and port.name.startswith(f"{METRICS}."):
            port = replace(port, kind="metric", name=port.name.removeprefix(f"{METRICS}."))
        kept_outputs.append(port)
        results.append(node)
    set_results(graph, results)
    drop_unread(graph)
    joint = replace(joint, inputs=tuple(kept_inputs), outputs=tuple(kept_outputs))
    return replace(traced.with_notes(*_missing_gradients(joint)), joint=joint)


def _missing_gradients(joint: Joint) -> list[str]:
    """A note on parameters that the loss does not depend on; raises CompileError if it depends on none."""
    trainable = {port.name for port in joint.inputs if port.kind == "parameter" and port.requires_grad}
    given = {port.name for port in joint.outputs if port.kind == "gradient"}
    missing = sorted(trainable - given)
    if missing and not given:
        raise CompileError("the loss reaches no trainable parameter: is it detached, or computed under no_grad?")
    if not missing:
        return []
    return [f"{len(missing)} trainable parameters do not reach the loss and stay as they are: {', '.join(missing[:5])}"]
