"""Error checks of linear algebra as NaN results: where torch raises an error for a matrix without inverse or factor, a program has NaN.

    inverse, info = linalg_inv_ex(a);  token = with_effects(token, _linalg_check_errors, info, ...)
  becomes
    inverse, info = linalg_inv_ex(a);  checked = where(info == 0, inverse, nan)

Ranks have tiles of a batch of matrices, and a check would wait for the device, so nothing raises; but what LAPACK leaves in such a matrix
must not be taken for a result either. The tokens by which torch orders checks are no part of a program.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch.fx import Graph, Node

from meshc.errors import CaptureError
from meshc.ir.functions import Function
from meshc.ir.graph import output_of, placeholders, results_of, set_results
from meshc.private import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    with_effects,
)

aten = torch.ops.aten
TOKENS = (ForwardTokenAOTInput, BackwardTokenAOTInput)
TOKENS_OUT = (ForwardTokenAOTOutput, BackwardTokenAOTOutput)


def settle_checks(graph: Graph) -> None:
    """Rewrite AOTAutograd's graph in place. Raises CaptureError for other operators with an effect."""
    checks = [node for node in graph.nodes if node.target is with_effects]
    for node in checks:
        if node.args[1] is not aten._linalg_check_errors.default:
            raise CaptureError(f"{node.args[1]} has an effect besides its results; programs have no such operators")
        _poison(node, node.args[2])
    output = output_of(graph)
    described = zip(results_of(graph), output.meta["desc"], strict=True)
    kept = [(value, description) for value, description in described if not isinstance(description, TOKENS_OUT)]
    set_results(graph, (value for value, _ in kept))
    output.meta["desc"] = [description for _, description in kept]
    for node in reversed(checks):
        for item in list(node.users):
            graph.erase_node(item)
        graph.erase_node(node)
    for node in placeholders(graph):
        if isinstance(node.meta.get("desc"), TOKENS):
            graph.erase_node(node)


def _poison(check: Node, info: Node) -> None:
    """NaN in all results of the factorisation for a matrix whose `info` is not 0."""
    while info.target in (aten.detach.default, aten.alias.default):
        info = cast(Node, info.args[0])
    factorisation = cast(Node, info.args[0])
    results = [item for item in factorisation.users if item is not info and _is_floating(item)]
    if info.target is not operator.getitem or not all(item.target is operator.getitem for item in results):
        raise CaptureError(f"the check of {info} follows no factorisation that meshc knows")
    graph = check.graph
    with graph.inserting_before(factorisation.next):
        reported = graph.node_copy(info, lambda _: factorisation)
        for item in results:
            raw = graph.node_copy(item, lambda _: factorisation)
            good = _insert_call(check, aten.eq.Scalar, reported, 0)
            for _ in range(raw.meta["val"].dim() - reported.meta["val"].dim()):
                good = _insert_call(check, aten.unsqueeze.default, good, -1)
            item.replace_all_uses_with(_insert_call(check, aten.where.ScalarOther, good, raw, float("nan")))
    for item in results:
        graph.erase_node(item)


def _is_floating(item: Node) -> bool:
    value = item.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _insert_call(like: Node, target: Function, first: Node, *rest: float | Node) -> Node:
    """A call with the value that tracing would have recorded, and the source of `like`."""
    args = (first, *rest)
    node = like.graph.call_function(target, args)
    node.meta.update(like.meta)
    values = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in args]
    with first.meta["val"].fake_mode:
        node.meta["val"] = target(*values)
    return node
