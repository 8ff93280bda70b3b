"""Gradients between backward and the update: hooks, gradient accumulation over calls, norm, clipping.

    g = hook(grad_w) + sum_w     norm = sqrt(square_sum(g) + ...)      c = clamp(max_norm / (norm + 1e-6), max=1)      g * c

All is written on the global view, so a norm is global whatever the mesh: its sum is partial over the axes that split gradients. Clipping
follows `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import Node

from meshc.errors import CompileError
from meshc.frontend.capture import SEED_STEP
from meshc.frontend.clipping import groups_of
from meshc.frontend.gradient_hooks import Hooks
from meshc.ir import record
from meshc.ir import update as set_reason
from meshc.ir.keys import key_of
from meshc.ops import norm as _norm  # noqa: F401 - registers meshc::square_sum
from meshc.optimizer.optimizer import GroupSpec, OptimizerSpec
from meshc.optimizer.spec import SUM
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.appender import Appender
from meshc.passes.trace.trace_hooks import apply_hooks
from meshc.program.program import Port

aten = torch.ops.aten
meshc = torch.ops.meshc


class Gradients:
    """Writes into the graph of `add`, and into `inputs` and `updates`. `constants`: the graph's own, and those of hooks."""

    def __init__(
        self,
        add: Appender,
        traced: TracedModel,
        modules: Mapping[str, Tensor],
        entered: Mapping[str, Node],
        inputs: list[Port],
        updates: dict[Node, str],
    ) -> None:
        self.add, self.traced, self.modules, self.entered, self.inputs, self.updates = add, traced, modules, entered, inputs, updates
        self.constants = dict(traced.operators().constants)
        self.sums: dict[str, Node] = {}

    def ahead_of_clipping(self, gradients: Mapping[str, Node]) -> tuple[dict[str, Node], Node]:
        """Gradients after hooks and accumulation, and the norm of all."""
        found = {name: self._through(name, self._accumulate(name, self._through(name, node, 0)), 1) for name, node in gradients.items()}
        before = len(self.add.made)
        total = self._norm(found)
        for node in self.add.made[before:]:
            set_reason(node, reason="the gradient norm")
        return found, total

    def _mark(self, before: int, name: str, reason: str = "") -> None:
        """Marks the nodes added since `before` as part of a parameter's update."""
        for node in self.add.made[before:]:
            if reason:
                set_reason(node, reason=reason)
            if node.target is not operator.getitem:
                self.updates[node] = name

    # Hooks.

    def _through(self, name: str, gradient: Node, when: int) -> Node:
        """The gradient after its hooks. `when`: 0 for hooks of the gradient; 1 for hooks of the parameter after accumulation."""
        hooks = self.traced.request.hooks.get(name)
        mine = hooks and (Hooks(hooks.of_gradient, ()) if when == 0 else Hooks((), hooks.of_parameter))
        if not mine or not (mine.of_gradient or mine.of_parameter):
            return gradient
        before, parameter = len(self.add.made), self.modules[name]
        like = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device="meta")
        entry = self.entered[key_of("parameter", name)]
        result = apply_hooks(name, mine, entry, gradient, like, self.add.call, self.seed_step, self._constant)
        self._mark(before, name, f"a gradient hook of {name}")
        return result

    def _constant(self, value: Tensor) -> Node:
        if isinstance(value, DTensor) or any(value is one for one in (*self.modules.values(), *self.traced.request.module.buffers())):
            raise CompileError(
                "a gradient hook reads a parameter or a buffer of the model, which would be a constant in it\n"
                "  what to do: give the hook a tensor of its own, as in mask = model.mask.clone()"
            )
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        self.inputs.append(Port("constant", name, tuple(value.shape), value.dtype))
        return self.add.placeholder(name, tuple(value.shape), value.dtype)

    def seed_step(self) -> Node:
        """The seed and step of random numbers, shared with the model if it draws any."""
        return self._seed_step

    @cached_property
    def _seed_step(self) -> Node:
        found = next((self.entered[port.key] for port in self.inputs if port.kind == "random"), None)
        if found is None:
            found = self.add.placeholder(SEED_STEP, (2,), torch.int64)
            self.inputs.append(Port("random", SEED_STEP, (2,), torch.int64))
        return found

    # Sums over calls.

    def _accumulate(self, name: str, gradient: Node) -> Node:
        spec = self.traced.request.optimizer
        group = None if spec is None else group_of(spec, self.modules[name])
        slot = next((slot for slot in group.slots_of(self.modules[name]) if slot.name == SUM), None) if group is not None else None
        if slot is None:
            return gradient
        port = Port("state", f"{name}/{SUM}", tuple(slot.size), slot.dtype, of=name)
        self.inputs.append(port)
        self.sums[name] = self.add.placeholder(port.name, port.shape, slot.dtype)
        before = len(self.add.made)
        result = self.add.call(aten.add.Tensor, self.sums[name], gradient)
        self._mark(before, name, f"gradients of {name} over calls")
        return result

    def accumulated_sums(self, gradients: Mapping[str, Node]) -> list[tuple[Port, Node]]:
        """The results of a call without an update: the accumulated sums, in their storage."""
        found = []
        for name, place in self.sums.items():
            before = len(self.add.made)
            value = self.add.call(meshc.round_param.default, place, gradients[name])
            self._mark(before, name)
            found.append((Port("state", f"{name}/{SUM}", record(value).shape, record(place).dtype or torch.float32, of=name), value))
        return found

    def zeroed_sums(self, name: str) -> dict[str, Node]:
        """The zeroed sum after an update has used it, by its slot."""
        if name not in self.sums:
            return {}
        place = self.sums[name]
        return {SUM: self.add.call(meshc.round_param.default, place, self.add.call(aten.zeros_like.default, place))}

    # Norm and clipping.

    def _norm(self, gradients: Mapping[str, Node]) -> Node:
        total: Node | None = None
        for name, gradient in gradients.items():
            square = self.add.call(meshc.square_sum.default, gradient)
            self.updates[square] = name
            total = square if total is None else self.add.call(aten.add.Tensor, total, square)
        assert total is not None
        return self.add.call(aten.sqrt.default, total)

    def coefficients(self, gradients: Mapping[str, Node], total: Node) -> dict[str, Node]:
        """By parameter, the factor of each gradient that is clipped. `total`: the norm of all."""
        found: dict[str, Node] = {}
        for limit, names in groups_of(self.traced.request.clip_grad_norm, gradients):
            norm = total if len(names) == len(gradients) else self._norm({name: gradients[name] for name in names})
            call = self.add.call
            ratio = call(aten.mul.Tensor, call(aten.reciprocal.default, call(aten.add.Tensor, norm, 1e-6)), float(limit))
            found |= dict.fromkeys(names, call(aten.clamp.default, ratio, None, 1.0))
        return found

    def clip(self, name: str, gradient: Node, coefficients: Mapping[str, Node]) -> Node:
        """A gradient times its coefficient, in its parameter's dtype."""
        if name not in coefficients:
            return gradient
        scaled = self.add.call(aten.mul.Tensor, gradient, coefficients[name])
        dtype = self.modules[name].dtype
        return scaled if record(scaled).dtype == dtype else self.add.call(aten._to_copy.default, scaled, dtype=dtype)


def group_of(spec: OptimizerSpec, parameter: object) -> GroupSpec | None:
    """The optimizer's group that holds a parameter."""
    return next((group for group in spec.groups if any(p is parameter for p in group.params)), None)
