"""Dead code elimination, also of single results: operators that compute several gradients compute those that are read.

    g, gw, gb = convolution_backward(grad, x, w, ..., [True, True, True])       where nothing reads g
  becomes
    _, gw, gb = convolution_backward(grad, x, w, ..., [False, True, True])

Autograd computes all gradients that are required; a step returns none of its inputs', and so reads none. Left in, they would be computed,
and would tie the results that are read to operands that these do not depend on: a bias's gradient alone is a sum of the convolution's
gradient, whose channels then need not be whole on any rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.ir import is_getitem, record, records, set_record
from meshc.ir.graph import call

aten = torch.ops.aten

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
