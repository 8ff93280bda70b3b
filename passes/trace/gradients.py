"""Gradient operators that a step appends between backward and the update: hooks, accumulation over calls, scaling, decay, norm, clipping.

    g = clamp(hook(grad_w) + sum_w, -t, t)     norm = sqrt(square_sum(g) + ...)      c = clamp(max_norm / (norm + 1e-6), max=1)      g * c

    g = (hook(grad_w) + sum_w) * (1 / scale)   applies = non_finite(grad_w) + ... == 0       where the loss is scaled

All is written on the global view, so a norm is global whatever the mesh: its sum is partial over the axes that split gradients. Clipping
follows `torch.nn.utils.clip_grad_value_` and then `clip_grad_norm_`, as the norm is of what is left of the largest elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cached_property, partial, reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument

from meshc.errors import CompileError, MeshcError
from meshc.frontend.capture import SEED_STEP
from meshc.frontend.clipping import groups_of
from meshc.frontend.gradient_hooks import Drawing, Hooks
from meshc.frontend.loss_scaling import SCALE, SKIPPED
from meshc.frontend.reference_random import ANSWERS
from meshc.ir import record
from meshc.ir import update as set_reason
from meshc.ir.functions import Function
from meshc.ir.graph import results_of
from meshc.ir.keys import key_of
from meshc.ir.schemas import arguments_by_name
from meshc.ops import norm as _norm  # noqa: F401 - registers meshc::square_sum
from meshc.optimizer.optimizer import GroupSpec, OptimizerSpec
from meshc.optimizer.spec import NON_FINITE, SUM
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.appender import Appender
from meshc.passes.trace.refine_gradients import SparseGradients
from meshc.private import FakeTensorMode
from meshc.program.program import Port

aten = torch.ops.aten
meshc = torch.ops.meshc


class Gradients:
    """Writes into the graph of `add`, and into `inputs`. `updates`: the nodes that update a parameter, with its name; `constants`: the
    graph's own, and those of hooks."""

    def __init__(
        self, add: Appender, traced: TracedModel, modules: Mapping[str, Tensor], entered: Mapping[str, Node], inputs: list[Port]
    ) -> None:
        self.add, self.traced, self.modules, self.entered, self.inputs = add, traced, modules, entered, inputs
        self.updates = dict(traced.operators().updates)
        self.constants = dict(traced.operators().constants)
        self.sums: dict[str, Node] = {}
        self.found: list[tuple[Port, Node]] = []
        """Results of what is found of gradients that are not finite."""
        self.applies: Node | None = None
        """Whether the step is no skipped one, if it may be."""
        self.sparse = SparseGradients(add, traced)

    def ahead_of_clipping(self, gradients: Mapping[str, Node]) -> tuple[dict[str, Node], Node]:
        """Gradients after hooks, accumulation, the decay of sparse lines and, where used, clipping by value; and the norm of all."""
        found = {name: self._through(name, self._accumulate(name, self._through(name, node, 0)), 1) for name, node in gradients.items()}
        if not self.traced.request.adds:
            found = self._unscale(found) if self.traced.request.scales_loss else found
            found = {name: self._refine(name, node) for name, node in found.items()}
            if (limit := self.traced.request.clip_grad_value) is not None:
                found = {name: self._clip_value(name, node, limit) for name, node in found.items()}
        before = len(self.add.made)
        total = self._norm(found)
        for node in self.add.made[before:]:
            set_reason(node, reason="the gradient norm")
        if self.traced.request.adds and self.traced.request.scales_loss:
            total = self.add.call(aten.mul.Tensor, total, self._inverse_scale)
        return found, total

    # Scaling.

    @cached_property
    def _inverse_scale(self) -> Node:
        """As torch's scaler has it: in float32, of a quotient in float64."""
        scale = self.entered[key_of("number", SCALE)]
        return self.add.call(aten._to_copy.default, self.add.call(aten.reciprocal.default, scale), dtype=torch.float32)

    def _unscale(self, gradients: Mapping[str, Node]) -> dict[str, Node]:
        """Gradients divided by the loss's scale; and whether all that an optimizer is to take are finite, as a number for each parameter
        and for all of them."""
        spec, counts, unscaled = self.traced.request.optimizer, dict[str, Node](), dict[str, Node]()
        inverse = self._inverse_scale
        for name, gradient in gradients.items():
            if spec is not None and group_of(spec, self.modules[name]) is not None:
                counts[name] = self._add_of(name, "whether gradients are finite", meshc.non_finite.default, gradient)
        for name, count in counts.items():  # read once all are there, so that they travel together
            port = Port("state", f"{name}/{NON_FINITE}", (), torch.float32, of=name)
            self.inputs.append(port)
            place = self.add.placeholder(port.name, (), torch.float32)
            self.found.append((port, self._add_of(name, "", meshc.round_param.default, place, count)))
        for name, gradient in gradients.items():
            unscaled[name] = self._add_of(name, "gradients are divided by the loss's scale", aten.mul.Tensor, gradient, inverse)
        if counts:
            total = reduce(partial(self.add.call, aten.add.Tensor), counts.values())
            self.found.append((Port("metric", SKIPPED, (), torch.float32), total))
            self.applies = self.add.call(aten.eq.Scalar, total, 0)
        return unscaled

    def _add_of(self, name: str, reason: str, target: Function, *args: Argument) -> Node:
        """An operator of a parameter's update."""
        before = len(self.add.made)
        node = self.add.call(target, *args)
        self.mark(before, name, reason)
        return node

    def _refine(self, name: str, gradient: Node) -> Node:
        before = len(self.add.made)
        result = self.sparse.refine(name, self.entered[key_of("parameter", name)], gradient)
        self.mark(before, name)
        return result

    def fix_weight(self, name: str, new: Node) -> Node:
        """An updated parameter as its sparse line has it; behind all updates, which run as one."""
        before = len(self.add.made)
        result = self.sparse.fix_weight(name, new)
        self.mark(before, name)
        return result

    def mark(self, before: int, name: str, reason: str = "") -> None:
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
        before = len(self.add.made)
        result = self._apply_hooks(name, mine, gradient)
        self.mark(before, name, f"a gradient hook of {name}")
        return result

    def _apply_hooks(self, name: str, hooks: Hooks, gradient: Node) -> Node:
        """The gradient after its hooks."""
        parameter = self.modules[name]
        traced = _trace_hooks(name, hooks, torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device="meta"))
        values: dict[Node, object] = {}
        given = iter((lambda: self.entered[key_of("parameter", name)], lambda: gradient, lambda: self.seed_step))
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                make = next(given)
                if node.users:
                    values[node] = make()
            elif node.op == "get_attr":
                values[node] = self._constant(getattr(traced, str(node.target)))
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), cast(Callable[[Node], Argument], values.__getitem__))
                values[node] = self.add.call(node.target, *args, **kwargs)
        return cast(Node, values[results_of(traced.graph)[1]])

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

    @cached_property
    def seed_step(self) -> Node:
        """The seed and step of random numbers, shared with the model if it draws any."""
        found = next((self.entered[port.key] for port in self.inputs if port.kind == "random"), None)
        if found is None:
            found = self.add.placeholder(SEED_STEP, (2,), torch.int64)
            self.inputs.append(Port("random", SEED_STEP, (2,), torch.int64))
        return found

    # Sums over calls.

    def _accumulate(self, name: str, gradient: Node) -> Node:
        spec, parameter = self.traced.request.optimizer, self.modules[name]
        group = None if spec is None else group_of(spec, parameter)
        slot = None if group is None else next((slot for slot in group.slots_of(parameter) if slot.name == SUM), None)
        if slot is None:
            return gradient
        port = Port("state", f"{name}/{SUM}", tuple(slot.size), slot.dtype, of=name)
        self.inputs.append(port)
        self.sums[name] = self.add.placeholder(port.name, port.shape, slot.dtype)
        before = len(self.add.made)
        result = self.add.call(aten.add.Tensor, self.sums[name], gradient)
        self.mark(before, name, f"gradients of {name} over calls")
        return result

    def accumulated_sums(self, gradients: Mapping[str, Node]) -> list[tuple[Port, Node]]:
        """The results of a call without an update: the accumulated sums, in their storage."""
        found = []
        for name, place in self.sums.items():
            before = len(self.add.made)
            value = self.add.call(meshc.round_param.default, place, gradients[name])
            self.mark(before, name)
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

    def _clip_value(self, name: str, gradient: Node, limit: float) -> Node:
        before = len(self.add.made)
        result = self.add.call(aten.clamp.default, gradient, -float(limit), float(limit))
        self.mark(before, name, "gradients are clipped by value")
        return result

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


# Gradient hooks: users' hooks on a parameter's gradient, traced into the graph ahead of clipping and the update.
#
#     w.register_hook(lambda g: 0.1 * g)                     g1 = mul(grad_w, 0.1)         w, m, v = adam(w, g1, m, v, ...)
#     w.register_hook(lambda g: g + torch.randn_like(g))     d = normal(seed, ...)         g1 = add(grad_w, d)
#
# Each parameter's hooks are run once, on a fake tensor; a tensor that they hold (a mask) is a constant of the program. A hook that reads
# values of a gradient in Python, writes to the parameter, or only inspects the gradient is refused: a program would not repeat that.


def _trace_hooks(name: str, hooks: Hooks, like: Tensor) -> GraphModule:
    """A graph of (parameter, gradient, seed and step), which returns the first two. `like`: a meta tensor of the parameter."""

    def function(parameter: Tensor, gradient: Tensor, seed_step: Tensor) -> tuple[Tensor, Tensor]:
        mine = parameter.clone()
        return mine, hooks(mine, gradient.clone())

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            fakes = [*(torch.empty(like.shape, dtype=like.dtype) for _ in range(2)), torch.zeros(2, dtype=torch.int64)]
            traced = make_fx(torch.func.functionalize(function, remove="mutations"))(*fakes)
            if any(_draws(node.target) for node in traced.graph.nodes):
                plain = traced

                def run_numbered(*given: Tensor) -> object:
                    return _StepDraws(plain, Drawing(name, given[2])).run(*given)

                traced = make_fx(torch.func.functionalize(run_numbered, remove="mutations"))(*fakes)
    except MeshcError as error:
        raise CompileError(f"{name}: {error}") from error
    except Exception as error:  # whatever a user's function raises where a tensor has no values
        raise CompileError(
            f"{name}: its gradient hook {hooks.names()} could not be traced: {type(error).__name__}: {str(error).partition(chr(10))[0]}\n"
            f"  why: a hook becomes part of the program, so it runs once, on a gradient without values\n{_ADVICE}"
        ) from error
    _without_copies(traced)
    _refuse(name, hooks, traced, like)
    return traced


_ADVICE = (
    "  what to do: make the gradient of torch operations on the gradient alone (torch.where for a branch on its values); what looks\n"
    "  at gradients: Options(training=Training(keep_gradients=True)), and look at parameter.grad after the call; a norm:\n"
    "  TrainStep(clip_grad_norm=...), and program.metrics"
)


def _refuse(name: str, hooks: Hooks, traced: GraphModule, like: Tensor) -> None:
    parameter, gradient = results_of(traced.graph)
    mine, given, *_ = traced.graph.find_nodes(op="placeholder")
    if parameter is not mine:
        raise CompileError(
            f"{name}: its gradient hook {hooks.names()} writes to the parameter\n"
            "  why: the optimizer of the step updates it, and nothing else\n"
            "  what to do: change the parameter after the call of the program, or have the optimizer do it"
        )
    if gradient is given:
        raise CompileError(
            f"{name}: its gradient hook {hooks.names()} leaves the gradient as it is\n"
            f"  why: what else it does would be done once, while it is traced, and by no call of the program\n{_ADVICE}"
        )
    value = gradient.meta["val"]
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        raise CompileError(
            f"{name}: its gradient hook {hooks.names()} makes {value.dtype} {list(value.shape)} of a gradient that is {like.dtype} "
            f"{list(like.shape)}\n  what to do: return a gradient of the parameter's shape and dtype"
        )


def _without_copies(traced: GraphModule) -> None:
    """Removes copies that were inserted so that hooks may write in place."""
    for node in list(traced.graph.nodes):
        if node.target in (aten.clone.default, aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.copy.default:
            here, source = node.meta["val"], node.args[1].meta["val"]
            if (here.shape, here.dtype) == (source.shape, source.dtype):
                node.replace_all_uses_with(node.args[1])
    traced.graph.eliminate_dead_code()


def _draws(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


class _StepDraws(Interpreter):
    """Runs a graph with its random calls replaced by numbered draws of a step."""

    def __init__(self, traced: GraphModule, drawing: Drawing) -> None:
        super().__init__(traced)
        self.drawing = drawing

    def call_function(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if not _draws(target):
            return super().call_function(target, args, dict(kwargs))
        answer = ANSWERS.get(target.overloadpacket)
        if answer is None:
            raise CompileError(f"{target} draws random numbers in a way that meshc does not define: use torch.randn_like or rand_like")
        return answer(self.drawing, target, arguments_by_name(target, args, kwargs))
