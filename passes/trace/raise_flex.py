"""Raise flex: calls of torch's `flex_attention` as one operator, with the user's functions as graphs.

    flex = torch.ops.higher_order.flex_attention(q, k, v, score, (32, 32, blocks, ..., mask), 0.5, {...}, (table,), ())    becomes
    flex = flex_attention(q, k, v, score, mask, False, 0.5, (table,), (), False, "model.py:12")

Part of `raise_ops`. Tracing has turned each function into a graph on scalars; the tensors that functions capture are operands of the call.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from meshc.errors import CompileError
from meshc.frontend.sources import source_of
from meshc.ir.graph import output_of, placeholders
from meshc.ops.flex import flex_attention
from meshc.ops.random_calls import draws

FLEX = torch.ops.higher_order.flex_attention


def raise_flex(module: GraphModule, node: Node) -> None:
    """Replaces the call in place, and erases attributes that only its blocks read."""
    q, k, v, score, blocks, scale, _options, captured_by_score, captured_by_mask = node.args
    assert isinstance(blocks, tuple) and isinstance(score, Node) and isinstance(blocks[-1], Node)
    mask, where = blocks[-1], str(source_of(node))
    scores, masks = _body(module, score), _body(module, mask)
    _refuse_draws(scores, f"the score_mod of flex_attention() at {where}")
    _refuse_draws(masks, f"the mask_mod of flex_attention() at {where}")
    statistics = any(user.target is operator.getitem and user.args[1] != 0 and _is_read(user) for user in node.users)
    shown = _result(masks)
    full = isinstance(shown, Node) and shown.op == "call_method" and shown.target == "new_ones"  # torch's default mask, which hides nothing
    node.target = flex_attention
    node.args = (
        q, k, v, None if _result(scores) is placeholders(scores)[0] else _function(scores, score), None if full else _function(masks, mask),
        _is_causal(masks), scale, captured_by_score, captured_by_mask, statistics, where,
    )  # fmt: skip
    for given in (score, *blocks):
        if isinstance(given, Node) and given.op == "get_attr" and not given.users:
            _forget(module, given)


def _body(module: GraphModule, node: Node) -> Graph:
    body = module.get_submodule(str(node.target))
    assert isinstance(body, GraphModule)
    return body.graph


def _is_read(node: Node) -> bool:
    """Whether a statistic is read, beyond the change of its unit that torch writes whether it is returned or not."""
    idle = (operator.getitem, operator.mul, "to")
    return any(user.target not in idle or _is_read(user) for user in node.users)


def _function(body: Graph, node: Node) -> Node:
    """A function's node, its graph ready for vmap."""
    for item in body.find_nodes(op="call_function", target=operator.getitem):
        item.target = element
    assert body.owning_module is not None
    body.owning_module.recompile()
    return node


def _result(body: Graph) -> Argument:
    given = output_of(body).args[0]
    return given[0] if isinstance(given, tuple | list) else given


def _is_causal(body: Graph) -> bool:
    """Whether a mask's graph is `i >= j`: that is folded whatever its size, known or symbolic."""
    _, _, i, j, *_ = placeholders(body)
    result = _result(body)
    return isinstance(result, Node) and (result.target, result.args) in ((operator.ge, (i, j)), (operator.le, (j, i)))


def _refuse_draws(body: Graph, what: str) -> None:
    for node in body.nodes:
        if node.op in ("call_function", "call_method") and draws(node.target, node.args, node.kwargs):
            name = getattr(node.target, "__name__", node.target)
            raise CompileError(
                f"{what} draws random numbers ({name}), which meshc numbers by call, not by score\n"
                "  what to do: draw outside of it, and read the numbers at the score's position (noise[b, h, i, j])"
            )


def element(x: Any, index: Any) -> object:
    """x[index] where tensors among the indices are positions, not numbers that a trace may read."""
    entries = index if isinstance(index, tuple) else (index,)
    positions = any(isinstance(entry, Tensor) for entry in entries) and all(isinstance(entry, Tensor | int) for entry in entries)
    if not isinstance(x, Tensor) or not positions:
        return x[index]
    at = [e if isinstance(e, Tensor) else torch.full((), e, dtype=torch.int64, device=x.device) for e in entries]
    return torch.ops.aten.index.Tensor(x, at)


def _forget(module: GraphModule, node: Node) -> None:
    name = str(node.target)
    module.graph.erase_node(node)
    if not any(other.op == "get_attr" and other.target == name for other in module.graph.nodes):
        delattr(module, name)
