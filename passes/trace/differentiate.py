"""Differentiate: one operator graph of forward and backward; of a training step with a constant loss tangent and counts of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.errors import CaptureError, CompileError
from meshc.frontend.expert_placement import WEIGHTS, is_slots
from meshc.frontend.loss_scaling import SCALE
from meshc.frontend.train_step import METRICS
from meshc.ir import Record, is_getitem, record, records, set_record
from meshc.ir.graph import call, placeholders, set_results
from meshc.ir.keys import is_a
from meshc.ops import expert_copies as _expert_copies  # noqa: F401 - registers meshc::copies_of
from meshc.passes.depth.slice_layers import slice_layers
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.trace import mean_of_parts
from meshc.passes.trace.count_experts import LAYOUT, PRODUCTS, count_experts
from meshc.passes.trace.joint_graph import joint_graph, operator_and_place
from meshc.passes.trace.set_compute import store_parameters
from meshc.program.program import Port

aten, meshc = torch.ops.aten, torch.ops.meshc


def differentiate(traced: TracedModel) -> TracedModel:
    model = traced.model
    with slice_layers(traced.request.module, traced.depth):
        joint = store_parameters(joint_graph(model), model.computed, traced.request.module, model.double)
    traced = replace(traced.with_notes(*model.notes), joint=joint)
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


def close_loss(traced: TracedModel) -> TracedModel:
    """The loss's tangent becomes the constant 1, or the number that the loss is scaled by; of a mean of microbatches its share. Gradients
    of inputs and buffers are dropped."""
    joint = traced.operators()
    graph = joint.graph
    share = 1.0 / (traced.parts.count if traced.parts is not None else 1)
    kept_inputs = [port for port in joint.inputs if port.kind != "tangent"]
    kept_outputs, results = [], []
    for port, node in zip(joint.inputs, placeholders(graph), strict=True):
        if port.kind == "tangent":
            made = Record((), port.dtype, phase="backward")
            if traced.request.scales_loss:
                one = _scale(graph, share, made)
                kept_inputs.append(Port("number", SCALE, (), torch.float64, of=SCALE))
            else:
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


def _scale(graph: Graph, share: float, made: Record) -> Node:
    """A share of the number that the loss is scaled by, in the loss's dtype."""
    with graph.inserting_after(placeholders(graph)[-1]):
        scale = graph.placeholder(SCALE)
    set_record(scale, Record((), torch.float64, phase="backward"))
    with graph.inserting_before(scale.next):
        part = scale if share == 1.0 else call(graph, record(scale), aten.mul.Tensor, scale, share)
        return call(graph, made, aten._to_copy.default, part, dtype=made.dtype)


def _missing_gradients(joint: Joint) -> list[str]:
    """A note on parameters that the loss does not depend on; raises CompileError if it depends on none."""
    trainable = {port.name for port in joint.inputs if port.kind == "parameter" and port.requires_grad}
    given = {port.name for port in joint.outputs if port.kind == "gradient"}
    missing = sorted(trainable - given)
    if missing and not given:
        raise CompileError("the loss reaches no trainable parameter: is it detached, or computed under no_grad?")
    said = f"{len(missing)} trainable parameters do not reach the loss and stay as they are: {', '.join(missing[:5])}"
    return [said] * bool(missing)


# Dead code elimination, also of single results: operators that compute several gradients compute those that are read.
#
#     g, gw, gb = convolution_backward(grad, x, w, ..., [True, True, True])       where nothing reads g
#   becomes
#     _, gw, gb = convolution_backward(grad, x, w, ..., [False, True, True])
#
# Autograd computes all gradients that are required; a step returns none of its inputs', and so reads none. Left in, they would be computed,
# and would tie the results that are read to operands that these do not depend on: a bias's gradient alone is a sum of the convolution's
# gradient, whose channels then need not be whole on any rank.


ASKED: Final[Mapping[object, tuple[int, ...]]] = {
    aten.convolution_backward.default: (0, 1, 2),
    aten.native_layer_norm_backward.default: (0, 1, 2),
    aten.grid_sampler_2d_backward.default: (0,),
    aten.grid_sampler_3d_backward.default: (0,),
}
"""Operators whose last argument requests results -> the results that can be left out."""


def drop_unread(graph: Graph) -> None:
    """In place. Results that are not requested have empty records; the gradient of a convolution's bias alone becomes a sum."""
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target not in ASKED or not all(map(is_getitem, node.users)):
            continue
        *given, asked = node.args
        assert isinstance(asked, list | tuple)
        read = {user.args[1] for user in node.users}
        wanted = [bool(want) and (place in read or place not in ASKED[node.target]) for place, want in enumerate(asked)]
        if node.target is aten.convolution_backward.default and wanted == [False, False, True]:
            _sum_alone(graph, node)
        elif wanted != list(asked):
            node.args = (*given, wanted)
            made = zip(records(node), wanted, strict=True)
            set_record(node, tuple(one if want else replace(one, shape=(), dtype=None) for one, want in made))
    graph.eliminate_dead_code()


def _sum_alone(graph: Graph, node: Node) -> None:
    """Replaces a convolution's backward of which only the bias's gradient is read by a sum."""
    grad, *_ = node.args
    assert isinstance(grad, Node)
    over = [0, *range(2, len(record(grad).shape))]
    for result in list(node.users):
        with graph.inserting_before(result):
            result.replace_all_uses_with(call(graph, record(result), aten.sum.dim_IntList, grad, over))


# Refusal of readers that index rows of movable experts' weights, which may be stored in another order than the model's.
#
#     group_mm(rows, transpose(gate_up_proj), choices_to_slots(choice))      right, whatever the order
#     gate_up_proj[0].norm()                                                 of another expert once they have moved: refused


ROW_BY_ROW: Final = (
    *LAYOUT, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten._to_copy.default, aten.cat.default,
    meshc.by_group.default, meshc.in_line.default,
)  # fmt: skip
"""Operators that keep rows apart and in order."""
CLAMPED: Final = (aten.clamp.default, aten.clamp_min.default)


def refuse_other_readers(joint: Joint) -> None:
    """Raises CaptureError where weights of movable experts are read otherwise than by slot."""
    names = {f"{port.name.rpartition('.')[0]}.{each}" for port in joint.inputs if is_slots(port.name) for each in WEIGHTS}
    found = joint.placeholders()
    held = [(name, node) for name in sorted(names) if (node := found.get(f"parameter:{name.lstrip('.')}")) is not None]
    faults = [f"{name}: {operator_and_place(reader)}" for name, node in held for reader in _row_readers(node)]
    if faults:
        raise CaptureError(
            'Options(experts=Experts(placement="movable")), and weights of experts that are read beside their layer\'s products:\n  '
            + "\n  ".join(faults[:4])
            + "\n  what to do: leave the option out, or what reads them"
        )


def _row_readers(weights: Node) -> list[Node]:
    """Readers that depend on the order of rows."""
    readers, found = [(weights, user) for user in weights.users], []
    while readers:
        read, user = readers.pop()
        if user.target is meshc.copies_of.default or (user.target in PRODUCTS and user.args[1] is read):
            continue
        if user.target in ROW_BY_ROW and (read is weights or read in user.all_input_nodes):
            readers += [(user, further) for further in user.users]
        elif not (user.target is aten.index.Tensor and user.args[0] is read and _by_slot(user)):
            found.append(user)
    return found


def _by_slot(user: Node) -> bool:
    """Whether an index comes from the slots of the experts that tokens chose."""
    indices = user.args[1]
    index = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    while isinstance(index, Node) and index.target in (*LAYOUT, *CLAMPED):
        index = index.args[0]
    return isinstance(index, Node) and index.target is meshc.choices_to_slots.default
