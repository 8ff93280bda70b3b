"""Fold scans: a scan between two flips, as one scan from the end.

    flip = aten.flip(x, [1])
    cumsum = aten.cumsum(flip, 1)
    flip_1 = aten.flip(cumsum, [1])             becomes             cumsum_back = meshc.cumsum_back(x, 1)

Autograd writes gradients of running sums, products and log-sums of exponentials in this form. A dim that is flipped must be whole; one that
is scanned may be split, from either end (`rules/scan.py`).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc import ir
from meshc.ops import scan_back as _operators  # noqa: F401 - registers them
from meshc.passes.phases.traced_model import TracedModel
from meshc.private import OpOverload

aten, meshc = torch.ops.aten, torch.ops.meshc

FROM_THE_END: dict[object, OpOverload] = {
    aten.cumsum.default: meshc.cumsum_back.default,
    aten.logcumsumexp.default: meshc.logcumsumexp_back.default,
}


def fold_scans(traced: TracedModel) -> TracedModel:
    """Replaces the second flip of each; operators that only led to it are erased."""
    graph = traced.operators().graph
    for node in graph.nodes:
        found = _between_flips(node)
        if found is not None:
            scan, (x, dim) = found
            node.target, node.args = FROM_THE_END[scan.target], (x, dim)
            node._rename(ir.op_name(node).partition(".")[2])
    graph.eliminate_dead_code()
    return traced


def _between_flips(node: Node) -> tuple[Node, tuple[Node, int]] | None:
    """The scan whose result a flip reverses, with its operand before the first flip, and the dim."""
    scan = _flip_operand(node)
    if scan is None or scan[0].target not in FROM_THE_END or scan[0].kwargs:
        return None
    first = _flip_operand(scan[0].args[0])
    dim, dims = scan[0].args[1], len(ir.record(node).shape)
    if first is None or not isinstance(dim, int) or not first[1] == scan[1] == dim % dims:
        return None
    dtype = ir.record(first[0]).dtype
    return (scan[0], (first[0], dim % dims)) if dtype is not None and dtype.is_floating_point else None


def _flip_operand(node: object) -> tuple[Node, int] | None:
    """The operand and the dim of a flip along one dim."""
    if not isinstance(node, Node) or node.target is not aten.flip.default:
        return None
    x, dims = node.args
    assert isinstance(x, Node) and isinstance(dims, list | tuple)
    if len(dims) != 1 or not isinstance(dims[0], int):
        return None
    return x, dims[0] % len(ir.record(node).shape)
