"""Raise flex: a call of torch's `flex_attention` becomes its meaning, with the functions that the user gave as graphs.

    flex = torch.ops.higher_order.flex_attention(q, k, v, score, (32, 32, blocks, ..., mask), 0.5, {...}, (table,), ())    becomes
    flex = flex_attention(q, k, v, score, mask, 0.5, (table,), (), False)

Part of `raise_ops`. Tracing has made a graph of each function, of single numbers; the tensors that they capture are operands of the call.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from meshc.capture import source_of
from meshc.errors import CompileError
from meshc.ops.flex import flex_attention
from meshc.ops.random_calls import draws

FLEX = torch.ops.higher_order.flex_attention


def raise_flex(module: GraphModule, node: Node) -> None:
    """Replace the call in place. What it alone read of the blocks goes."""
    q, k, v, score, blocks, scale, _options, captured_by_score, captured_by_mask = node.args
    assert isinstance(blocks, tuple) and isinstance(score, Node) and isinstance(blocks[-1], Node)
    for name, function in (("score_mod", score), ("mask_mod", blocks[-1])):
        _refuse_draws(module, function, f"the {name} of flex_attention() at {source_of(node)}")
    statistics = any(user.target is operator.getitem and user.args[1] != 0 and _is_returned(user) for user in node.users)
    node.target = flex_attention
    node.args = (
        q, k, v, _function(module, score, 1), _function(module, blocks[-1], 0), scale, captured_by_score, captured_by_mask, statistics,
        str(source_of(node)),
    )  # fmt: skip
    for given in (score, *blocks):
        if isinstance(given, Node) and given.op == "get_attr" and not given.users:
            _forget(module, given)


def _is_returned(node: Node) -> bool:
    """Whether anything that the model gives back depends on a value, or its memory may (a method that works in place)."""
    seen, edge = {node}, [node]
    while edge:
        last = edge.pop()
        if last.op in ("output", "call_method") and str(last.target).endswith(("_", "output")):
            return True
        new = [user for user in last.users if user not in seen]
        seen.update(new)
        edge += new
    return False


def _function(module: GraphModule, node: Node, scores: int) -> Node | None:
    """The graph of a function, ready to be mapped; None for the identity, and for a mask that hides nothing."""
    body = module.get_submodule(str(node.target))
    assert isinstance(body, GraphModule)
    (output,) = body.graph.find_nodes(op="output")
    result = output.args[0]
    if isinstance(result, tuple | list):
        (result,) = result
    first = body.graph.find_nodes(op="placeholder")[0]
    if scores and result is first or not scores and _is_full(result):
        return None
    for item in body.graph.find_nodes(op="call_function", target=operator.getitem):
        item.target = element
    body.recompile()
    return node


def _refuse_draws(module: GraphModule, function: Node, what: str) -> None:
    for node in module.get_submodule(str(function.target)).graph.nodes:  # type: ignore[union-attr]
        if node.op in ("call_function", "call_method") and draws(node.target, node.args, node.kwargs):
            name = getattr(node.target, "__name__", node.target)
            raise CompileError(
                f"{what} draws random numbers ({name}), which meshc numbers by call, not by score\n"
                "  what to do: draw outside of it, and read the numbers at the score's position (noise[b, h, i, j])"
            )


def _is_full(result: Any) -> bool:
    """What torch's own mask for no mask is traced to."""
    return isinstance(result, Node) and result.op == "call_method" and result.target == "new_ones"


def element(x: Any, index: Any) -> Any:
    """x[index] where tensors among the indices are positions, not numbers that a trace may read."""
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Tensor) or not any(isinstance(entry, Tensor) for entry in entries):
        return x[index]
    if not all(isinstance(entry, Tensor | int) for entry in entries):
        return x[index]
    at = [e if isinstance(e, Tensor) else torch.full((), e, dtype=torch.int64, device=x.device) for e in entries]
    return torch.ops.aten.index.Tensor(x, at)


def _forget(module: GraphModule, node: Node) -> None:
    name = str(node.target)
    module.graph.erase_node(node)
    if not any(other.op == "get_attr" and other.target == name for other in module.graph.nodes):
        delattr(module, name)
