"""Masks that are made anew every so many steps, and are state of a training step between.

    m = meshc.keep_largest(v, 2, 2)     becomes     m = meshc.keep_masked(v, state:w/meshc.mask, state:w/meshc.mask_steps, 2, 2, 10, -1)
                                                    state:w/meshc.mask = meshc.next_mask(v, .., .., 2, 2, 10, -1)
                                                    state:w/meshc.mask_steps = state:w/meshc.mask_steps + 1

A mask lies as its weight does, so it is made and used without a message. Of a weight that no update writes masks stay what they are anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.fx import Node

from meshc.ir import record
from meshc.ir.functions import Function
from meshc.ir.keys import key_of
from meshc.ops import sparsity as _sparsity  # noqa: F401 - registers its operators
from meshc.optimizer.spec import MASK, MASK_STEPS
from meshc.passes.phases.traced_model import Joint, SparseWeight, TracedModel
from meshc.passes.trace.step_state import StepState, has_gradient, is_held

aten, meshc = torch.ops.aten, torch.ops.meshc


class KeptMasks:
    """`state`: by parameter with such a mask, the mask as the step before has left it, and the number of steps."""

    def __init__(self, traced: TracedModel, weights: Mapping[str, SparseWeight]) -> None:
        joint = traced.operators()
        self.weights, self.parameters, self.step = weights, joint.placeholders(), StepState(joint)
        self.state: dict[str, tuple[Node, Node]] = {}
        for name, weight in weights.items():
            if weight.line.every and has_gradient(traced, name) and is_held(traced, name):
                shape = record(self.parameter(name)).shape
                mask = self.step.enter(name, MASK, shape, torch.bool)
                self.state[name] = mask, self.step.enter(name, MASK_STEPS, (1,), torch.int64)

    def parameter(self, name: str) -> Node:
        return self.parameters[key_of("parameter", name)]

    def write(self, target: Function, name: str, emit: Callable[..., Node], view: Node) -> Node:
        """`next_mask`, or what it leaves of the parameter: of its `view` in groups. `emit(like, shape, target, *args)`: adds a node."""
        (mask, steps), weight, groups = self.state[name], self.weights[name], list(record(view).shape)
        apart, line = emit(mask, groups, aten.reshape.default, mask, groups), weight.line
        numbers = line.n, weight.dim + 1, line.every, -1 if line.until is None else line.until
        return emit(view, groups, target, view, apart, steps, *numbers)

    def write_results(self) -> Joint:
        """The joint graph with masks that go on; the same if there are none. They are made ahead of the updates, which write parameters in
        place, and behind all products, whose first says how a parameter is stored."""
        add, updates = self.step.add, self.step.updates
        for name, (_, steps) in self.state.items():
            weight, parameter = self.weights[name], self.parameter(name)
            shape, dim, m = record(parameter).shape, weight.dim, weight.line.m
            view = add.call(aten.reshape.default, parameter, [*shape[:dim], shape[dim] // m, m, *shape[dim + 1 :]])
            made = self.write(meshc.next_mask.default, name, lambda like, shape, target, *args: add.call(target, *args), view)
            after = add.call(aten.add.Tensor, steps, 1)
            updates |= {made: name, after: name}
            self.step.leave(name, MASK, add.call(aten.reshape.default, made, list(shape)))
            self.step.leave(name, MASK_STEPS, after)
        return self.step.write_results()
