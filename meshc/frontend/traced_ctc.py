"""`torch.nn.functional.ctc_loss` in a traced model: one operator, with each row's targets as a row.

    loss = F.ctc_loss(log_probs, labels.masked_select(labels >= 0), frames, (labels >= 0).sum(-1))
      becomes
    loss = mean of meshc.ctc_loss(log_probs, chosen_in_front(labels, labels >= 0), frames, (labels >= 0).sum(-1)) by row

Stock speech models select the targets of all rows into one list, whose length no program can have; by the mask of that selection they are
moved to the front of their rows. Targets that are passed as a list are put into rows by their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from meshc.frontend.side_effects import erase_dead_code, is_check
from meshc.ops import ctc
from meshc.replacements import replace_targets


@contextmanager
def traced_ctc() -> Iterator[None]:
    """A context in which the loss is `meshc::ctc_loss`; stock models choose cuDNN's kernels around it, or none, which is not traced.

    Dynamo looks torch's functions up by name, once, and would take the replacement for torch's own: the lookup is done before.
    """
    from meshc.private import trace_rules

    trace_rules.get_torch_obj_rule_map()
    with replace_targets(ctc_loss=ctc.loss_of_rows, cudnn_flags=_as_they_are):
        yield


def _as_they_are(*args: object, **kwargs: object) -> nullcontext[None]:
    return nullcontext()


def targets_in_rows(module: GraphModule) -> None:
    """Give each such loss of a torch-level graph its targets in rows. A loss whose targets are selected in another way is left as it is."""
    for body in [body for body in module.modules() if isinstance(body, GraphModule)]:
        for node in body.graph.nodes:
            if getattr(node.target, "overloadpacket", node.target) is torch.ops.meshc.ctc_loss:
                _in_rows(node)
        body.recompile()


def _in_rows(loss: Node) -> None:
    _, targets, _, lengths, *_ = loss.args
    assert isinstance(targets, Node) and isinstance(lengths, Node)
    if _value(targets).dim() == 2:
        return
    picked = _mask_selection(targets)
    with loss.graph.inserting_before(loss):
        if picked is not None and _counts(lengths, picked[1]):
            rows = _call(loss, ctc.chosen_in_front, *picked)
        elif isinstance(_value(targets).shape[0], int):
            rows = _call(loss, ctc.rows_of_list, targets, lengths)
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


def _call(loss: Node, function: Callable[..., Any], *args: Node) -> Node:
    made = loss.graph.call_function(function, args)
    made.meta |= {key: loss.meta[key] for key in ("stack_trace", "nn_module_stack", "source_fn_stack") if key in loss.meta}
    return made


def _value(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _mask_selection(targets: Node) -> tuple[Node, Node] | None:
    """(x, mask) of a list selected by `x.masked_select(mask)` or `x[mask]`, if both are [rows, s]; None for any other list."""
    name = getattr(targets.target, "__name__", targets.target)
    if name not in ("masked_select", "getitem") or len(targets.args) != 2:
        return None
    x, mask = targets.args
    if isinstance(mask, tuple) and len(mask) == 1:
        (mask,) = mask
    if not isinstance(x, Node) or not isinstance(mask, Node) or _value(mask).dtype != torch.bool:
        return None
    return (x, mask) if _value(x).dim() == 2 and _value(x).shape == _value(mask).shape else None


def _counts(lengths: Node, mask: Node) -> bool:
    """Whether `lengths` is the number of true entries in each row of `mask`."""
    while _is_cast(lengths):
        lengths = lengths.all_input_nodes[0]
    if getattr(lengths.target, "__name__", lengths.target) != "sum":
        return False
    dim = lengths.args[1] if len(lengths.args) > 1 else lengths.kwargs.get("dim", lengths.kwargs.get("axis"))
    return lengths.args[0] is mask and dim in (-1, 1, (-1,), (1,), [-1], [1]) and not lengths.kwargs.get("keepdim", False)


def _is_cast(node: Node) -> bool:
    """Whether a call keeps the numbers and their order."""
    name = getattr(node.target, "__name__", node.target)
    return name in ("to", "long", "int", "contiguous", "reshape") and _value(node).dim() == _value(node.all_input_nodes[0]).dim()
