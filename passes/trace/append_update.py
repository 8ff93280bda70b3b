"""Update: gradient norm, clipping and the optimizer become part of the graph.

    loss, grad_w
  becomes
    norm = sqrt(square_sum(grad_w) + ...)     c = clamp(max_norm / (norm + 1e-6), max=1)     w, m, v = adam(w, grad_w * c, m, v, lr, ...)

Everything is written on the global view, so the norm is global whatever the mesh: its sum is pending over the axes that split gradients.
Parameters without a gradient are left alone, as torch.optim does. Clipping follows `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.errors import CompileError
from meshc.frontend.capture import SEED_STEP
from meshc.frontend.listed_experts import unchosen
from meshc.ir import Record, Source, record, set_record
from meshc.ir import update as set_reason
from meshc.ir.functions import Function
from meshc.ir.graph import give, output_of, placeholders
from meshc.ir.keys import key_of
from meshc.ops import norm as _norm  # noqa: F401 - registers meshc::square_sum
from meshc.optimizer.keeping import kept_update
from meshc.optimizer.optimizer import GroupSpec, OptimizerSpec
from meshc.optimizer.spec import MASTER
from meshc.passes.depth.slice import sliced
from meshc.passes.depth.standing import whole_names
from meshc.passes.phases.traced import Traced
from meshc.passes.trace.bias_updates import bias_updates
from meshc.passes.trace.keep_unchosen import Unchosen
from meshc.program.program import Port

aten = torch.ops.aten
meshc = torch.ops.meshc


class Appender:
    """Adds global-view nodes before a graph's output; shapes and dtypes come from meta tensors."""

    def __init__(self, graph: Graph, phase: str, source: Source | None = None) -> None:
        self.graph, self.phase, self.source = graph, phase, source or Source()
        self.meta: dict[Node, object] = {}
        self.output = output_of(graph)
        self.made: list[Node] = []

    def value(self, argument: object) -> object:
        if isinstance(argument, Node):
            if argument not in self.meta:
                found = record(argument)
                self.meta[argument] = torch.empty(found.shape, dtype=found.dtype, device="meta")
            return self.meta[argument]
        if isinstance(argument, list | tuple):
            return type(argument)(self.value(item) for item in argument)
        return argument

    def call(self, target: Function, *args: Argument, **kwargs: Argument) -> Node:
        with self.graph.inserting_before(self.output):
            node = self.graph.call_function(target, args, kwargs)
        given = {key: self.value(item) for key, item in kwargs.items()}
        if "device" in given:
            given["device"] = "meta"
        result = target(*map(self.value, args), **given)
        self.meta[node] = result
        self.made.append(node)
        if isinstance(result, list | tuple):
            set_record(node, tuple(self._record(item) for item in result))
        else:
            set_record(node, self._record(result))
        return node

    def _record(self, result: object) -> Record:
        if isinstance(result, torch.Tensor):
            return Record(tuple(result.shape), result.dtype, source=self.source, phase=self.phase)
        return Record(source=self.source, phase=self.phase)

    def placeholder(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
        with self.graph.inserting_after(placeholders(self.graph)[-1]):
            node = self.graph.placeholder("".join(c if c.isalnum() else "_" for c in name))
        set_record(node, Record(shape, dtype, phase=self.phase))
        return node


def append_update(traced: Traced) -> Traced:
    """Norm, clipping and optimizer; without an optimizer, gradients stay the program's outputs."""
    spec = traced.request.optimizer
    if spec is None:
        return traced
    joint = traced.operators()
    graph, inputs, updates = joint.graph, list(joint.inputs), dict[Node, str]()
    add = Appender(graph, "update")
    entered = joint.placeholders()
    results = list(zip(joint.outputs, joint.results(), strict=True))
    kept = [(port, node) for port, node in results if port.kind != "gradient"]
    gradients = {port.name: node for port, node in results if port.kind == "gradient"}
    with sliced(traced.request.module, traced.depth):
        modules = dict(traced.request.module.named_parameters())
        uncalled = unchosen(traced.request.module)
        step, model = traced.request.expert_bias_update, traced.request.module
        kept += [] if step is None else bias_updates(model, step, entered, kept, add.call)
    if not gradients:
        _refuse_frozen(list(modules))
    total = _global_norm(add, gradients, updates)
    for node in add.made:
        set_reason(node, reason="the gradient norm")
    kept.append((Port("metric", "grad_norm", (), record(total).dtype or torch.float32), total))
    coefficient = _clip_coefficient(add, total, traced.request.clip_grad_norm)
    _refuse_strange(spec, gradients, modules)
    _refuse_idle(spec, gradients, modules)
    numbers = _number_inputs(add, inputs, spec)
    seed_step = cache(lambda: _seed_input(add, inputs, entered))
    unwritten: dict[str, str] = {}
    experts = Unchosen(add.call, uncalled, kept)
    for name, gradient in gradients.items():
        parameter = modules[name]
        group = _group_of(spec, parameter)
        if group is None:
            continue
        before = len(add.made)
        if coefficient is not None:
            gradient = _clipped(add, gradient, coefficient, parameter.dtype)
        mine = entered[key_of("parameter", name)]
        state = _state_inputs(add, inputs, name, parameter, group)
        like = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device="meta")
        new, after = kept_update(group, name, mine, gradient, state, numbers[group.index], add.call, like, parameter, seed_step)
        if new is mine:
            unwritten[name] = group.optimizer
        new, after = experts.kept(name, mine, new, state, after)
        kept.append((Port("parameter", name, tuple(parameter.shape), parameter.dtype, of=name), new))
        for slot in group.slots_of(parameter):
            value = after[slot.name]
            kept.append((Port("state", f"{name}/{slot.name}", record(value).shape, slot.dtype, of=name), value))
        for node in add.made[before:]:
            if node.target is not operator.getitem:
                updates[node] = name
    _refuse_unwritten(unwritten)
    give(graph, (node for _, node in kept))
    joint = replace(joint, inputs=tuple(inputs), outputs=tuple(port for port, _ in kept), updates=updates)
    return replace(traced.noting(*_strangers(spec, gradients, modules, traced), *_without_masters(spec)), joint=joint)


def _refuse_frozen(names: list[str]) -> None:
    """A step of a model in which nothing takes a gradient: one device would refuse it in backward."""
    why = f"{_listed(names)}: requires_grad is False" if names else "the model has no parameters"
    raise CompileError(
        f"there is nothing to train\n  why: {why}\n"
        "  what to do: requires_grad_(True) on what is to be trained, before meshc.compile; a model that is only to be evaluated is\n"
        "  compiled without a TrainStep, under torch.no_grad()"
    )


def _global_norm(add: Appender, gradients: dict[str, Node], updates: dict[Node, str]) -> Node:
    total: Node | None = None
    for name, gradient in gradients.items():
        square = add.call(meshc.square_sum.default, gradient)
        updates[square] = name
        total = square if total is None else add.call(aten.add.Tensor, total, square)
    assert total is not None
    return add.call(aten.sqrt.default, total)


def _clip_coefficient(add: Appender, total: Node, limit: float | None) -> Node | None:
    if limit is None:
        return None
    ratio = add.call(aten.mul.Tensor, add.call(aten.reciprocal.default, add.call(aten.add.Tensor, total, 1e-6)), float(limit))
    return add.call(aten.clamp.default, ratio, None, 1.0)


def _number_inputs(add: Appender, inputs: list[Port], spec: OptimizerSpec) -> list[dict[str, Node]]:
    found: list[dict[str, Node]] = []
    for group in spec.groups:
        row = {}
        for entry in group.numbers:
            row[entry] = add.placeholder(f"number_{group.index}_{entry}", (), torch.float64)
            inputs.append(Port("number", f"{group.index}.{entry}", (), torch.float64, of=f"{group.index}.{entry}"))
        found.append(row)
    return found


def _seed_input(add: Appender, inputs: list[Port], entered: Mapping[str, Node]) -> Node:
    """The seed and the step of random numbers, the model's own if it draws some."""
    found = next((entered[port.key] for port in inputs if port.kind == "random"), None)
    if found is None:
        found = add.placeholder(SEED_STEP, (2,), torch.int64)
        inputs.append(Port("random", SEED_STEP, (2,), torch.int64))
    return found


def _clipped(add: Appender, gradient: Node, coefficient: Node, dtype: torch.dtype) -> Node:
    """The gradient by the coefficient, in its parameter's dtype."""
    scaled = add.call(aten.mul.Tensor, gradient, coefficient)
    return scaled if record(scaled).dtype == dtype else add.call(aten._to_copy.default, scaled, dtype=dtype)


def _state_inputs(add: Appender, inputs: list[Port], name: str, parameter: torch.Tensor, group: GroupSpec) -> dict[str, Node]:
    """Placeholders for a parameter's state, by slot; their ports go to `inputs`."""
    state: dict[str, Node] = {}
    for slot in group.slots_of(parameter):
        shape = tuple(parameter.shape) if slot.shape == "like_param" else tuple(slot.size)
        state[slot.name] = add.placeholder(f"{name}/{slot.name}", shape, slot.dtype)
        inputs.append(Port("state", f"{name}/{slot.name}", shape, slot.dtype, of=name))
    return state


def _group_of(spec: OptimizerSpec, parameter: object) -> GroupSpec | None:
    return next((group for group in spec.groups if any(p is parameter for p in group.params)), None)


def _refuse_strange(spec: OptimizerSpec, gradients: Mapping[str, Node], modules: Mapping[str, object]) -> None:
    """An optimizer over other parameters than the model's."""
    if not any(p is modules[name] for name in gradients for group in spec.groups for p in group.params):
        raise CompileError(
            f"{spec.optimizer} updates none of the model's parameters\n"
            "  what to do: build the optimizer from the parameters of the model that is compiled, as they are now"
        )


def _refuse_idle(spec: OptimizerSpec, gradients: Mapping[str, Node], modules: Mapping[str, object]) -> None:
    """Parameters with a gradient that an optimizer holds and no step reaches."""
    holders = {id(parameter): holder for parameter, holder in spec.idle}
    faults = {name: holders[id(modules[name])] for name in gradients if id(modules[name]) in holders}
    if faults:
        raise CompileError(
            f"{_listed(faults)}: held by {_holders(faults)}, whose step is not called, so they would never be updated\n"
            f"  why: what steps is {spec.optimizer}\n"
            "  what to do: call its step too, or give TrainStep(optimizer=[...]) with all optimizers that are to step; parameters\n"
            "  that are to stay as they are: leave them out, or set requires_grad_(False)"
        )


def _refuse_unwritten(faults: Mapping[str, str]) -> None:
    if faults:
        raise CompileError(
            f"{_listed(faults)}: held by {_holders(faults)}, and have a gradient, but its step leaves them as they are\n"
            f"  why: {_holders(faults)}.step was traced for parameters of their shape, and writes nothing to them\n"
            "  what to do: give them to an optimizer that updates them, TrainStep(optimizer=[first, second]); parameters\n"
            "  that are to stay as they are: leave them out, or set requires_grad_(False)"
        )


def _strangers(spec: OptimizerSpec, gradients: Mapping[str, Node], modules: Mapping[str, object], traced: Traced) -> list[str]:
    """Notes on parameters that no optimizer holds, and on those of the optimizer that are not the model's."""
    notes = []
    held = {id(p) for group in spec.groups for p in group.params}
    free = [whole for name in gradients if id(modules[name]) not in held for whole in whole_names(traced.depth, name)]
    if free:
        notes.append(f"no optimizer holds {_listed(free)}: they have a gradient and are not updated")
    mine = {id(p) for p in traced.request.module.parameters()}  # of all layers, captured or not
    others = sum(id(p) not in mine for group in spec.groups for p in group.params)
    if others:
        notes.append(f"{spec.optimizer} holds {others} parameters that are not the model's: a compiled step leaves them as they are")
    return notes


def _without_masters(spec: OptimizerSpec) -> list[str]:
    """A note where masters were asked for, and no parameter is in 16 bits."""
    asked = any(group.keeping.master for group in spec.groups)
    made = any(slot.name == MASTER for group in spec.groups for slots in group.slots for slot in slots)
    return ["master_weights=True: no parameter of the optimizer has 16 bits, so none has a master"] if asked and not made else []


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def _holders(faults: Mapping[str, str]) -> str:
    return " and ".join(dict.fromkeys(faults.values()))
