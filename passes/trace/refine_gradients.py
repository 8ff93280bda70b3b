"""Decay of weights that products do not read under a sparse line (SR-STE): a term of the gradient.

    grad_w                becomes           g = reshape(grad_w, [o, k / 4, 4]);  v = reshape(w, [o, k / 4, 4])
                                            grad_w = reshape(meshc.refine_gradient(g, v, 2, 2, 2e-4), [o, k])

Added once to the whole gradient of a step, behind hooks and sums over calls, ahead of the norm and of clipping: what is clipped is the
gradient that the optimizer gets. Source: equation 9 of Zhou et al. 2021 (arXiv 2102.04010), whose authors too add it in backward
(NM-sparsity/NM-sparsity, devkit/sparse_ops/sparse_ops.py).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ir import record
from meshc.ir import update as set_reason
from meshc.ops import sparsity as _sparsity  # noqa: F401 - registers its operators
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.phases.traced_model import SparseWeight, TracedModel
from meshc.passes.trace.appender import Appender

aten, meshc = torch.ops.aten, torch.ops.meshc


def sparse_weight_of(traced: TracedModel, name: str) -> SparseWeight | None:
    """The groups of a captured parameter; None if products read all of it."""
    return next((traced.sparsity[whole] for whole in whole_names(traced.depth, name) if whole in traced.sparsity), None)


def refine_gradient(add: Appender, weight: SparseWeight, parameter: Node, gradient: Node) -> Node:
    """The gradient with the decay of its line."""
    if not weight.line.decay:
        return gradient
    before, shape = len(add.made), record(parameter).shape
    dim, line = weight.dim, weight.line
    groups = [*shape[:dim], shape[dim] // line.m, line.m, *shape[dim + 1 :]]
    pair = (add.call(aten.reshape.default, value, groups) for value in (gradient, parameter))
    refined = add.call(meshc.refine_gradient.default, *pair, line.n, dim + 1, line.decay)
    made = add.call(aten.reshape.default, refined, list(shape))
    for node in add.made[before:]:
        set_reason(node, reason=f"the decay of `{line}`")
    return made
