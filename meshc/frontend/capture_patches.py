"""Substitutions during capture: contexts that replace code which torch cannot trace, and in-place rewrites of the captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import dropwhile
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution, kl
from torch.fx import GraphModule, Node

from meshc.errors import CaptureError
from meshc.frontend import trace_errors
from meshc.frontend.batch_norms import averaged_norms, synced_norms
from meshc.frontend.flex_on_cpu import traced_flex
from meshc.frontend.grouped_calls import grouped_calls
from meshc.frontend.in_place_changes import is_changed_later
from meshc.frontend.inner_transforms import storage_of, traced_transforms
from meshc.frontend.inserted_calls import InsertedCalls
from meshc.frontend.known_outcomes import known_outcomes, write_known_values
from meshc.frontend.libraries import traceable_libraries
from meshc.frontend.listed_experts import listed_experts
from meshc.frontend.selected_places import is_mask, name_of, value_of
from meshc.frontend.selected_rows import follow_selected_rows
from meshc.frontend.side_effects import (
    TraceObservations,
    dropped_checks_note,
    erase_dead_code,
    is_check,
    leave_out_checks,
    observe_side_effects,
)
from meshc.frontend.skipped_work import without_guards
from meshc.frontend.sources import bodies_of, source_of
from meshc.frontend.traced_gradients import traced_gradients
from meshc.ir import trees
from meshc.ops import ctc
from meshc.private import AdaptiveOutput
from meshc.replacements import replace_targets


@contextmanager
def traceable_model(module: nn.Module) -> Iterator[None]:
    """A context in which a model's code runs in the form in which it is traced."""
    enabled = torch.backends.mha.get_fastpath_enabled()  # that fuses whole layers into operators of which no rule knows
    with (
        traceable_libraries(module), trees.registration(), grouped_calls(), listed_experts(module), traced_flex(), synced_norms(),
        replace_targets(adaptive_loss=loss_of_clusters, adaptive_prediction=likeliest),
    ):  # fmt: skip
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def apply_capture_patches(opened: bool) -> Iterator[TraceObservations]:
    """A context with all substitutions in torch's tracer, which also records the side effects of Python. `opened`: sizes are dynamic, and
    guards on them are kept."""
    with (
        nullcontext() if opened else without_guards(), traced_ctc(), averaged_norms(), unvalidated_distributions(), traced_gradients(),
        mended_calls(), traced_transforms(), known_outcomes(), observe_side_effects() as seen,
    ):  # fmt: skip
        yield seen


def settle_graph(graph: GraphModule) -> list[str]:
    """Rewrites what a captured graph has of Python and of values alone, in place; returns notes. Raises CaptureError."""
    targets_in_rows(graph)
    notes = dropped_checks_note(graph)
    leave_out_checks(graph)
    write_known_values(graph)
    set_data_in_place(graph)
    follow_selected_rows(graph)
    trace_errors.refuse_values(graph)
    return notes


def mended_calls() -> AbstractContextManager[None]:
    """A context in which three calls of torch are traced as they are meant.

    The last states of an `nn.LSTM` have their real shapes: in torch 2.11, those of a layer have one dim of length 1 too many in a trace,
    with more than one sequence. An autograd function that gets one tensor twice is refused: torch 2.11 traces the tensor's gradient once;
    later releases refuse it themselves. The causal hint of an `nn.Transformer` is the caller's `is_causal`, and False where none was given:

        nn.Transformer()(src, tgt, tgt_mask=mask)    torch compares the values of the mask with a causal one's, to choose kernels

    The answer is a hint beside the mask, and the mask is applied in any case: without the hint the result is the same. meshc itself finds
    out whether a mask is causal, from the operators that computed it (`passes/trace/fold_masks.py`).
    """
    from meshc.private import AutogradFunctionApplyVariable, decompositions

    layer, call = decompositions.one_layer_lstm, AutogradFunctionApplyVariable.call_function

    def of_two_dims(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, states = layer(*args, **kwargs)
        return out, tuple(state.flatten(0, -2) for state in states)

    def check_and_call(self_: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = [one.realize() for one in args]
        nodes = [one.as_proxy().node for one in given if one.is_tensor() and one.requires_grad]
        if len(set(nodes)) < len(nodes):
            raise RuntimeError("autograd.Function.apply: duplicate tensor input")
        return call(self_, tx, args, kwargs)

    def caller_hint(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return replace_targets(lstm_layer=of_two_dims, autograd_function_call=check_and_call, causal_hint=caller_hint)


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """A context in which a distribution validates neither its arguments nor its samples, as under torch.compile (an explicit
    `validate_args=True` does); and `kl_divergence` finds the function of two classes in a table, instead of a search."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with replace_targets(divergences=kl._KL_REGISTRY):
            yield
    finally:
        Distribution.set_default_validate_args(checked)


# `nn.AdaptiveLogSoftmaxWithLoss` in a traced model: each cluster of classes on all rows, with a mask of those whose target is in it.
#
#     rows = mask.nonzero().squeeze();  if rows.numel() == 0: continue          per_row = log_softmax(tail(where(mask, input, 0)))
#     output.index_copy_(0, rows, log_softmax(tail(input[rows])) ...)           output = where(mask, per_row ..., output)
#
# torch gives each tail the rows of its own cluster, whose number is data, and skips a cluster without rows: it has no gradient then, and
# zeros here, which an update skips by the same mask (`passes/trace/append_update.py`). torch checks for targets outside of all classes; a
# program does not.


def loss_of_clusters(self: Any, input_: Tensor, target_: Tensor) -> Any:
    batched = target_.dim() > 0
    x, target = (input_, target_) if batched else (input_.unsqueeze(0), target_.unsqueeze(0))
    if target.dim() != 1 or x.dim() != 2 or x.size(0) != target.size(0):
        raise RuntimeError(f"a row of the input for each target: {list(input_.size())} and {list(target_.size())}")
    output = x.new_zeros(target.size(0))
    column = torch.where(target < self.shortlist_size, target, 0)
    for i, tail in enumerate(self.tail):
        low, high = self.cutoffs[i], self.cutoffs[i + 1]
        mask = (target >= low) & (target < high)
        logs = F.log_softmax(tail(torch.where(mask.unsqueeze(1), x, 0)), dim=1)
        own = logs.gather(1, torch.where(mask, target - low, 0).unsqueeze(1)).squeeze(1)
        output = torch.where(mask, own, output)
        column = torch.where(mask, self.shortlist_size + i, column)
    output = output + F.log_softmax(self.head(x), dim=1).gather(1, column.unsqueeze(1)).squeeze(1)
    return AdaptiveOutput(output if batched else output.squeeze(0), (-output).mean())


def likeliest(self: Any, input: Tensor) -> Tensor:
    head = self.head(input)
    found = torch.argmax(head, dim=1)
    return torch.where(found < self.shortlist_size, found, torch.argmax(self._get_full_log_prob(input, head), dim=1))


# Assignments to `x.data` in a trace, as copies in place.
#
#     key.data = key.data * m + query.data * (1 - m)          set_(key, y)          key.data.copy_(y)
#
# On one device x shares the memory of y from there on, and earlier views of x keep the old memory. Where the trace shows neither, the copy
# means the same; else the line is refused.


_AUTOGRAD: Any = torch._C._autograd
DATA: Final = (_AUTOGRAD._get_data_attr, "detach", torch.detach)
"""Calls whose result shares the memory of their operand, without being a view for torch."""
SETTERS: Final = (Tensor.set_, getattr(torch.ops.aten, "shallow_copy_data_", None))
"""Dynamo's call for an assignment; the second from torch 2.14 on."""
COUNTED: Final = "_lower_version_count_by_1"
"""Dynamo's call after such a write, by which torch's version counter ignores it."""


def set_data_in_place(module: GraphModule) -> None:
    """Rewrite the assignments of a trace in place. Raises CaptureError."""
    setters = [node for node in module.graph.nodes if node.target in SETTERS and len(node.args) == 2]
    if not setters:
        return
    written = InsertedCalls(module)
    for node in setters:
        x, y = node.args
        if (why := _shared(module, node, x, y)) is not None:
            raise CaptureError(
                f"the model sets the .data of a tensor, {why}\n  in your model: {source_of(node)}\n"
                "  why: the tensor has the memory of another from there on, and a program's tensors have each their own\n"
                "  what to do: write the values, as in x.data.copy_(y), in the place of x.data = y"
            )
        written._call(node, "copy_", written._call(node, DATA[0], x), y)
        node.replace_all_uses_with(x)
        for user in [user for user in x.users if getattr(user.target, "__name__", "") == COUNTED]:
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.recompile()


def _shared(module: GraphModule, node: Node, x: Node, y: Node) -> None | str:
    """Why a copy would mean something else; None if it means the same."""
    held_there = getattr(module, str(x.target), None) if x.op == "get_attr" else None
    shape = x.meta["example_value"].shape  # that of the assigned value
    if isinstance(held_there, Tensor) and held_there.shape != shape:
        return f"of shape {list(held_there.shape)}, to one of shape {list(shape)}"
    later = {*dropwhile(lambda one: one is not node, module.graph.nodes)}
    held = [one for one in module.graph.nodes if one.op in ("get_attr", "placeholder") and one is not x]
    if storage_of(y) in map(storage_of, held):
        return "to the memory of another tensor that it holds or is given"
    if is_changed_later(y) or any(user is not node and user in later for user in y.users):
        return "and goes on to use what it is set to"
    if any(user in later for view in _views(x) for user in view.users):
        return "and goes on to use a view of what it was"
    return None


def _views(x: Node) -> Iterator[Node]:
    value = x.meta["example_value"]
    for user in x.users:
        made = value_of(user)
        if made is not value and isinstance(made, Tensor) and (user.target in DATA or made._base is value):
            yield user
            yield from _views(user)


# `torch.nn.functional.ctc_loss` in a traced model: one operator, with each row's targets as a row.
#
#     loss = F.ctc_loss(log_probs, labels.masked_select(labels >= 0), frames, (labels >= 0).sum(-1))
#       becomes
#     loss = mean of meshc.ctc_loss(log_probs, chosen_in_front(labels, labels >= 0), frames, (labels >= 0).sum(-1)) by row
#
# Stock speech models select the targets of all rows into one list, whose length no program can have; by the mask of that selection they are
# moved to the front of their rows. Targets that are passed as a list are put into rows by their lengths.


def traced_ctc() -> AbstractContextManager[None]:
    """A context in which the loss is `meshc::ctc_loss`; stock models choose cuDNN's kernels around it, or none, which is not traced.

    Dynamo looks torch's functions up by name, once, and would take the replacement for torch's own: the lookup is done before.
    """
    from meshc.private import trace_rules

    trace_rules.get_torch_obj_rule_map()

    def flags_as_they_are(*args: object, **kwargs: object) -> nullcontext[None]:
        return nullcontext()

    return replace_targets(ctc_loss=ctc.loss_of_rows, cudnn_flags=flags_as_they_are)


def targets_in_rows(module: GraphModule) -> None:
    """Give each such loss of a torch-level graph its targets in rows. A loss whose targets are selected in another way is left as it is."""
    for body in bodies_of(module):
        for node in body.graph.nodes:
            if getattr(node.target, "overloadpacket", node.target) is torch.ops.meshc.ctc_loss:
                _in_rows(body, node)
        body.recompile()


def _in_rows(body: GraphModule, loss: Node) -> None:
    _, targets, _, lengths, *_ = loss.args
    assert isinstance(targets, Node) and isinstance(lengths, Node)
    if value_of(targets).dim() == 2:
        return
    picked = _mask_selection(targets)
    if picked is not None and _counts(lengths, picked[1]):
        rows = InsertedCalls(body)._call(loss, ctc.chosen_in_front, *picked)
    elif isinstance(value_of(targets).shape[0], int):
        rows = InsertedCalls(body)._call(loss, ctc.rows_of_list, targets, lengths)
    else:
        return
    loss.replace_input_with(targets, rows)
    _forget_with_checks(targets)


def _forget_with_checks(targets: Node) -> None:
    """Erases a list that only torch's assertions on its size still read."""
    found = {targets: None}
    for node in targets.graph.nodes:
        if any(one in found for one in node.all_input_nodes):
            found[node] = None
    if all(node.users or node is targets or is_check(node) for node in found):
        for node in reversed([*found][1:]):
            node.graph.erase_node(node)
        erase_dead_code(targets)


def _mask_selection(targets: Node) -> tuple[Node, Node] | None:
    """(x, mask) of a list selected by `x.masked_select(mask)` or `x[mask]`, if both are [rows, s]; None for any other list."""
    if name_of(targets) not in ("masked_select", "getitem") or len(targets.args) != 2:
        return None
    x, mask = targets.args
    if isinstance(mask, tuple) and len(mask) == 1:
        (mask,) = mask
    if not isinstance(x, Node) or not isinstance(mask, Node) or not is_mask(mask):
        return None
    return (x, mask) if value_of(x).dim() == 2 and value_of(x).shape == value_of(mask).shape else None


def _counts(lengths: Node, mask: Node) -> bool:
    """Whether `lengths` is the number of true entries in each row of `mask`."""
    while _is_cast(lengths):
        lengths = lengths.all_input_nodes[0]
    if name_of(lengths) != "sum":
        return False
    dim = lengths.args[1] if len(lengths.args) > 1 else lengths.kwargs.get("dim", lengths.kwargs.get("axis"))
    return lengths.args[0] is mask and dim in (-1, 1, (-1,), (1,), [-1], [1]) and not lengths.kwargs.get("keepdim", False)


def _is_cast(node: Node) -> bool:
    """Whether a call keeps the numbers and their order."""
    keeps = name_of(node) in ("to", "long", "int", "contiguous", "reshape")
    return keeps and value_of(node).dim() == value_of(node.all_input_nodes[0]).dim()
