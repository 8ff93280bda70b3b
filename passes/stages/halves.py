"""Split of a stage's backward for zero-bubble schedules: gradients of inputs (I), and gradients of weights (W).

    g = mm(grad, w.t)        I: its result goes on to the stage before, or to further layers of this one
    gw = mm(x.t, grad)       W: only the gradient of one weight depends on it

Zero-bubble schedules run W whenever a rank would idle (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241).

A convolution's backward is one operator for both, which kernels compute one after the other anyway; it is split by its output mask:

    g, gw, gb = convolution_backward(grad, x, w, ..., [True, True, True])
  becomes
    g, _, _ = convolution_backward(grad, x, w, ..., [True, False, False])       I
    _, gw, gb = convolution_backward(grad, x, w, ..., [False, True, True])      W

A layer norm's backward has a mask too, but is left whole: it reads its operands once for all three results, and would read them twice.
Batch and group norms consist of smaller operators anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.ir import is_getitem, records
from meshc.ir.graph import call, copy_graph
from meshc.passes.stages.stage_assignment import BACKWARD, Half, Kinds
from meshc.program.program import Stage

aten = torch.ops.aten

WEIGHTS: Final = "W"


def split_convolution_backwards(each: Stage) -> Stage:
    """A copy of the stage with each convolution's backward in two where both are read; the stage itself if there is none."""
    if not any(_makes_both(node) for node in each.graph.nodes):
        return each
    graph = copy_graph(each.graph)
    for node in filter(_makes_both, list(graph.nodes)):
        *given, wanted = node.args
        with graph.inserting_before(node):
            inputs = _with_mask(graph, node, given, [True, False, False])
            weights = _with_mask(graph, node, given, [False, *wanted[1:]])
        for result in list(node.users):
            result.update_arg(0, weights if result.args[1] else inputs)
        graph.erase_node(node)
    return replace(each, graph=graph)


def _makes_both(node: Node) -> bool:
    """Whether an operator computes gradients of its input and of weights, and both are read."""
    if node.target is not aten.convolution_backward.default:
        return False
    read = {result.args[1] for result in node.users if result.users}
    return 0 in read and bool(read & {1, 2})


def _with_mask(graph: Graph, node: Node, given: Sequence[Argument], mask: Sequence[bool]) -> Node:
    none = [replace(one, shape=(), dtype=None, sharding=None) for one in records(node)]
    made = tuple(one if wanted else empty for one, empty, wanted in zip(records(node), none, mask, strict=True))
    return call(graph, made, aten.convolution_backward.default, *given, list(mask))


def split_backward(found: Kinds, placed: Mapping[Node, Half], parts: Collection[Node], stages: Collection[int]) -> dict[Node, Half]:
    """`placed` with the backward of `stages` split in two halves. `parts`: the gradients of one microbatch."""
    made, among = dict(placed), frozenset(parts)
    weight: dict[Node, Node | None] = {}  # the only gradient that depends on a value; None if there are several
    for node in reversed(found.backward):
        half = placed[node]
        own = [user for user in node.users if user in weight and placed[user] == half]
        gradients = {weight[user] for user in own} | ({node} if node in among else set())
        if None not in gradients and node.users and all(map(is_getitem, node.users)):
            gradients = {node}  # those of one layer's weight and bias count as one
        alone = len(gradients) == 1 and not any(user in placed and placed[user] != half for user in node.users)
        alone = alone and records(node)[0].chunk is None  # values of a chunk of the head are freed before the next one begins
        weight[node] = next(iter(gradients)) if alone else None
        if weight[node] is not None and half.stage in stages and half.op == BACKWARD:
            made[node] = Half(half.stage, WEIGHTS)
    for node in found.backward:
        if is_getitem(node):
            made[node] = made[node.args[0]]  # type: ignore[index]
    return made
