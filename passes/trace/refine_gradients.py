"""Gradients of weights that products do not read under a sparse line: with a decay (SR-STE), or none where masks are fixed.

    grad_w                becomes           g = reshape(grad_w, [o, k / 4, 4]);  v = reshape(w, [o, k / 4, 4])
                                            grad_w = reshape(meshc.refine_gradient(g, v, 2, 2, 2e-4), [o, k])

Added once to the whole gradient of a step, behind hooks and sums over calls, ahead of the norm and of clipping: what is clipped is the
gradient that the optimizer gets. Under `fixed` the gradient is masked instead, and so is what an update makes of the weight. Source:
equation 9 of Zhou et al. 2021 (arXiv 2102.04010), whose authors too add it in backward (NM-sparsity/NM-sparsity,
devkit/sparse_ops/sparse_ops.py).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ir import record
from meshc.ir import update as set_reason
from meshc.ops import sparsity as _sparsity  # noqa: F401 - registers its operators
from meshc.optimizer.spec import MASK
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.phases.traced_model import SparseWeight, TracedModel
from meshc.passes.trace.appender import Appender

aten, meshc = torch.ops.aten, torch.ops.meshc


def sparse_weight_of(traced: TracedModel, name: str) -> SparseWeight | None:
    """The groups of a captured parameter; None if products read all of it."""
    return next((traced.sparsity[whole] for whole in whole_names(traced.depth, name) if whole in traced.sparsity), None)


class SparseGradients:
    """Writes into the graph of `add`. `masks`: by parameter whose mask is fixed, which of its entries products read; the gradient is made
    of it, so that it is made of the parameter's old value wherever an update writes in place. `kept`: by parameter, this step's mask where
    it is state."""

    def __init__(self, add: Appender, traced: TracedModel) -> None:
        self.add, self.traced = add, traced
        self.masks: dict[str, Node] = {}
        joint = traced.operators()
        self.kept = {port.of: node for port, node in zip(joint.outputs, joint.results(), strict=True) if port.name.endswith(f"/{MASK}")}

    def refine(self, name: str, parameter: Node, gradient: Node) -> Node:
        """The gradient with the decay of its parameter's line, or masked."""
        weight = sparse_weight_of(self.traced, name)
        if weight is None or not (weight.line.fixed or weight.line.decay):
            return gradient
        before, (line, dim), shape = len(self.add.made), (weight.line, weight.dim), record(parameter).shape
        groups = [*shape[:dim], shape[dim] // line.m, line.m, *shape[dim + 1 :]]
        if name in self.kept:
            left = self.add.call(aten.where.ScalarOther, self.add.call(aten.logical_not.default, self.kept[name]), parameter, 0.0)
            return self.add.call(aten.add.Tensor, gradient, left, alpha=line.decay)
        apart = [self.add.call(aten.reshape.default, value, groups) for value in ([parameter] if line.fixed else [gradient, parameter])]
        if line.fixed:
            mask = self.add.call(meshc.is_largest.default, *apart, line.n, dim + 1)
            self.masks[name] = self.add.call(aten.reshape.default, mask, list(shape))
            made = self.add.call(aten.where.ScalarOther, self.masks[name], gradient, 0.0)
        else:
            refined = self.add.call(meshc.refine_gradient.default, *apart, line.n, dim + 1, line.decay)
            made = self.add.call(aten.reshape.default, refined, list(shape))
        for node in self.add.made[before:]:
            set_reason(node, reason=f"`{line}`")
        return made

    def fix_weight(self, name: str, new: Node) -> Node:
        """An updated parameter, with zeros where a fixed mask has them."""
        return self.add.call(aten.where.ScalarOther, self.masks[name], new, 0.0) if name in self.masks else new
