"""Update: gradient norm, clipping and the optimizer, appended to the joint graph.

    loss, grad_w
  becomes
    norm = sqrt(square_sum(grad_w) + ...)     c = clamp(max_norm / (norm + 1e-6), max=1)     w, m, v = adam(w, grad_w * c, m, v, lr, ...)

What precedes the optimizer is in `gradients.py`. Parameters without a gradient are unchanged, as in torch.optim.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from meshc.errors import CompileError
from meshc.frontend.listed_experts import unchosen_parameters
from meshc.ir import record
from meshc.ir.graph import set_results
from meshc.ir.keys import key_of
from meshc.optimizer.kept_update import kept_update
from meshc.optimizer.optimizer import GroupSpec, OptimizerSpec
from meshc.optimizer.spec import MASTER, SUM
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.depth.slice_layers import slice_layers
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.trace.appender import Appender
from meshc.passes.trace.bias_updates import bias_updates
from meshc.passes.trace.gradients import Gradients, group_of
from meshc.passes.trace.keep_unchosen import UnchosenExperts, rows_of_clusters, zero_gradient_notes
from meshc.program.program import Port

aten = torch.ops.aten
meshc = torch.ops.meshc


def append_update(traced: TracedModel) -> TracedModel:
    """Appends norm, clipping and optimizer; without an optimizer, gradients stay the program's outputs."""
    spec, joint = traced.request.optimizer, traced.operators()
    if spec is None:
        return traced.with_notes(
            *zero_gradient_notes(traced.request.module, [port.name for port in joint.outputs if port.kind == "gradient"])
        )
    graph, inputs, updates = joint.graph, list(joint.inputs), dict[Node, str]()
    add = Appender(graph, "update")
    entered = joint.placeholders()
    results = list(zip(joint.outputs, joint.results(), strict=True))
    kept = [(port, node) for port, node in results if port.kind != "gradient"]
    gradients = {port.name: node for port, node in results if port.kind == "gradient"}
    with slice_layers(traced.request.module, traced.depth):
        modules = dict(traced.request.module.named_parameters())
        uncalled = unchosen_parameters(traced.request.module)
        step, model = traced.request.options.experts.bias_update, traced.request.module
        kept += [] if step is None else bias_updates(model, step, entered, kept, add.call)
    if not gradients:
        _refuse_frozen(list(modules))
    found = Gradients(add, traced, modules, entered, inputs, updates)
    gradients, total = found.ahead_of_clipping(gradients)
    kept.append((Port("metric", "grad_norm", (), record(total).dtype or torch.float32), total))
    _refuse_strange(spec, gradients, modules)
    _refuse_idle(spec, gradients, modules)
    if traced.request.adds:
        kept += found.accumulated_sums(gradients)
        return _with_results(traced, joint, inputs, kept, found)
    coefficients = found.coefficients(gradients, total)
    numbers = _number_inputs(add, inputs, spec)
    unwritten: dict[str, str] = {}
    clusters = rows_of_clusters(model, uncalled, entered, traced.parts is not None)
    experts = UnchosenExperts(add.call, uncalled, kept, clusters)
    for name, gradient in gradients.items():
        parameter = modules[name]
        group = group_of(spec, parameter)
        if group is None:
            continue
        before = len(add.made)
        gradient = found.clip(name, gradient, coefficients)
        sums = found.zeroed_sums(name)
        mine = entered[key_of("parameter", name)]
        state = _state_inputs(add, inputs, name, parameter, group)
        like = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device="meta")
        new, after = kept_update(group, name, mine, gradient, state, numbers[group.index], add.call, like, parameter, found.seed_step)
        after |= sums
        if new is mine:
            unwritten[name] = group.optimizer
        new, after = experts.keep_state(name, mine, new, state, after)
        kept.append((Port("parameter", name, tuple(parameter.shape), parameter.dtype, of=name), new))
        for slot in group.slots_of(parameter):
            value = after[slot.name]
            kept.append((Port("state", f"{name}/{slot.name}", record(value).shape, slot.dtype, of=name), value))
        for node in add.made[before:]:
            if node.target is not operator.getitem:
                updates[node] = name
    _refuse_unwritten(unwritten)
    noted = traced.with_notes(*_foreign_parameter_notes(spec, gradients, modules, traced), *_without_masters(spec))
    return _with_results(noted, joint, inputs, kept, found)


def _with_results(traced: TracedModel, joint: Joint, inputs: list[Port], kept: list[tuple[Port, Node]], found: Gradients) -> TracedModel:
    """The phase with a joint graph whose results are `kept`."""
    set_results(joint.graph, (node for _, node in kept))
    outputs = tuple(port for port, _ in kept)
    joint = replace(joint, inputs=tuple(inputs), outputs=outputs, updates=found.updates, constants=found.constants)
    return replace(traced, joint=joint)


def _refuse_frozen(names: list[str]) -> None:
    """Refuses a step of a model without trainable parameters, which torch would refuse in backward."""
    why = f"{_list_text(names)}: requires_grad is False" if names else "the model has no parameters"
    raise CompileError(
        f"there is nothing to train\n  why: {why}\n"
        "  what to do: requires_grad_(True) on what is to be trained, before meshc.compile; a model that is only to be evaluated is\n"
        "  compiled without a TrainStep, under torch.no_grad()"
    )


def _number_inputs(add: Appender, inputs: list[Port], spec: OptimizerSpec) -> list[dict[str, Node]]:
    found: list[dict[str, Node]] = []
    for group in spec.groups:
        row = {}
        for entry in group.numbers:
            row[entry] = add.placeholder(f"number_{group.index}_{entry}", (), torch.float64)
            inputs.append(Port("number", f"{group.index}.{entry}", (), torch.float64, of=f"{group.index}.{entry}"))
        found.append(row)
    return found


def _state_inputs(add: Appender, inputs: list[Port], name: str, parameter: torch.Tensor, group: GroupSpec) -> dict[str, Node]:
    """Placeholders for a parameter's state, by slot; their ports are appended to `inputs`."""
    state: dict[str, Node] = {}
    for slot in group.slots_of(parameter):
        if slot.name == SUM:  # its placeholder was added with the gradient
            continue
        shape = tuple(parameter.shape) if slot.shape == "like_param" else tuple(slot.size)
        state[slot.name] = add.placeholder(f"{name}/{slot.name}", shape, slot.dtype)
        inputs.append(Port("state", f"{name}/{slot.name}", shape, slot.dtype, of=name))
    return state


def _refuse_strange(spec: OptimizerSpec, gradients: Mapping[str, Node], modules: Mapping[str, object]) -> None:
    """Refuses an optimizer that has none of the model's parameters."""
    if not any(p is modules[name] for name in gradients for group in spec.groups for p in group.params):
        raise CompileError(
            f"{spec.optimizer} updates none of the model's parameters\n"
            "  what to do: build the optimizer from the parameters of the model that is compiled, as they are now"
        )


def _refuse_idle(spec: OptimizerSpec, gradients: Mapping[str, Node], modules: Mapping[str, object]) -> None:
    """Refuses parameters with a gradient whose optimizer is never stepped."""
    holders = {id(parameter): holder for parameter, holder in spec.idle}
    faults = {name: holders[id(modules[name])] for name in gradients if id(modules[name]) in holders}
    if faults:
        raise CompileError(
            f"{_list_text(faults)}: held by {_holders(faults)}, whose step is not called, so they would never be updated\n"
            f"  why: what steps is {spec.optimizer}\n"
            "  what to do: call its step too, or give TrainStep(optimizer=[...]) with all optimizers that are to step; parameters\n"
            "  that are to stay as they are: leave them out, or set requires_grad_(False)"
        )


def _refuse_unwritten(faults: Mapping[str, str]) -> None:
    if faults:
        raise CompileError(
            f"{_list_text(faults)}: held by {_holders(faults)}, and have a gradient, but its step leaves them as they are\n"
            f"  why: {_holders(faults)}.step was traced for parameters of their shape, and writes nothing to them\n"
            "  what to do: give them to an optimizer that updates them, TrainStep(optimizer=[first, second]); parameters\n"
            "  that are to stay as they are: leave them out, or set requires_grad_(False)"
        )


def _foreign_parameter_notes(
    spec: OptimizerSpec, gradients: Mapping[str, Node], modules: Mapping[str, object], traced: TracedModel
) -> list[str]:
    """Notes on parameters that no optimizer holds, and on the optimizer's parameters that are not the model's."""
    notes = []
    held = {id(p) for group in spec.groups for p in group.params}
    free = [whole for name in gradients if id(modules[name]) not in held for whole in whole_names(traced.depth, name)]
    if free:
        notes.append(f"no optimizer holds {_list_text(free)}: they have a gradient and are not updated")
    mine = {id(p) for p in traced.request.module.parameters()}  # of all layers, captured or not
    others = sum(id(p) not in mine for group in spec.groups for p in group.params)
    if others:
        notes.append(f"{spec.optimizer} holds {others} parameters that are not the model's: a compiled step leaves them as they are")
    return notes


def _without_masters(spec: OptimizerSpec) -> list[str]:
    """A note where master weights are requested and no parameter has 16 bits."""
    asked = any(group.keeping.master_weights for group in spec.groups)
    made = any(slot.name == MASTER for group in spec.groups for slots in group.slots for slot in slots)
    return ["master_weights=True: no parameter of the optimizer has 16 bits, so none has a master"] if asked and not made else []


def _list_text(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def _holders(faults: Mapping[str, str]) -> str:
    return " and ".join(dict.fromkeys(faults.values()))
