"""Update: gradient norm, clipping and the optimizer, appended to the joint graph.

    loss, grad_w
  becomes
    norm = sqrt(square_sum(grad_w) + ...)     c = clamp(max_norm / (norm + 1e-6), max=1)     w, m, v = adam(w, grad_w * c, m, v, lr, ...)

Where the loss is scaled, a step whose gradients are not all finite leaves parameters and state as they are: w1 = update_if(w, w1, applies).
What precedes the optimizer is in `gradients.py`. Parameters without a gradient are unchanged, as in torch.optim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Final

import torch
from torch import nn
from torch.fx import Node

from meshc.errors import CompileError, join_names
from meshc.frontend.expert_bias import biases_of
from meshc.frontend.listed_experts import ZEROS, unchosen_parameters
from meshc.frontend.train_step import ROUTED
from meshc.ir import record, records
from meshc.ir.graph import set_results
from meshc.ir.keys import key_of
from meshc.ops.state_rounding import IN_PLACE
from meshc.optimizer.kept_update import kept_update
from meshc.optimizer.optimizer import GroupSpec, OptimizerSpec
from meshc.optimizer.spec import GRADIENT, MASTER, SUM
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.depth.slice_layers import slice_layers
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.trace.appender import Appender
from meshc.passes.trace.count_experts import LAYOUT, Beside
from meshc.passes.trace.gradients import Gradients, group_of
from meshc.passes.trace.refine_gradients import SparseGradients
from meshc.program.program import Port

aten = torch.ops.aten
meshc = torch.ops.meshc


def append_update(traced: TracedModel) -> TracedModel:
    """Appends norm, clipping and optimizer; without an optimizer, gradients stay the program's outputs."""
    spec, joint = traced.request.optimizer, traced.operators()
    if spec is None:
        noted = traced.with_notes(
            *zero_gradient_notes(traced.request.module, [port.name for port in joint.outputs if port.kind == "gradient"])
        )
        return _refine_results(noted) if traced.sparsity else noted
    model, inputs, entered = traced.request.module, list(joint.inputs), joint.placeholders()
    add = Appender(joint.graph, "update")
    results = list(zip(joint.outputs, joint.results(), strict=True))
    kept = [(port, node) for port, node in results if port.kind != "gradient"]
    gradients = {port.name: node for port, node in results if port.kind == "gradient"}
    counts = {port.name.removeprefix(ROUTED): node for port, node in kept if port.kind == "metric" and port.name.startswith(ROUTED)}
    with slice_layers(model, traced.depth):
        modules = dict(model.named_parameters())
        uncalled = unchosen_parameters(model)
        step = traced.request.options.experts.bias_update
        kept += [] if step is None else bias_updates(model, step, entered, counts, add.call)
    if not gradients:
        _refuse_frozen(list(modules))
    found = Gradients(add, traced, modules, entered, inputs)
    gradients, total = found.ahead_of_clipping(gradients)
    kept += [(Port("metric", "grad_norm", (), record(total).dtype or torch.float32), total), *found.found]
    _refuse_strange_or_idle(spec, gradients, modules)
    if traced.request.adds:
        kept += found.accumulated_sums(gradients)
        return _with_results(traced, joint, inputs, kept, found)
    coefficients = found.coefficients(gradients, total)
    numbers = _number_inputs(add, inputs, spec)
    unwritten: dict[str, str] = {}
    clusters = rows_of_clusters(model, uncalled, entered, traced.parts is not None)
    experts = UnchosenExperts(add.call, uncalled, counts, clusters)
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
        row = numbers[group.index]
        new, after = kept_update(
            group, name, mine, gradient, state, row, add.call, like, parameter, lambda: found.seed_step, found.applies
        )
        after |= sums
        if new is mine:
            unwritten[name] = group.optimizer
        new, after = experts.keep_state(name, mine, new, state, after)
        if found.applies is not None:
            new, after = _skip_update(add, found.applies, (mine, state), (new, after))
        kept.append((Port("parameter", name, tuple(parameter.shape), parameter.dtype, of=name), new))
        for slot in group.slots_of(parameter):
            value = after[slot.name]
            kept.append((Port("state", f"{name}/{slot.name}", record(value).shape, slot.dtype, of=name), value))
        found.mark(before, name)
    _refuse_unwritten(unwritten)
    for place, (port, node) in enumerate(kept):
        if port.kind == "parameter" and port.name not in unwritten:
            kept[place] = port, found.fix_weight(port.name, node)
    noted = traced.with_notes(*_foreign_parameter_notes(spec, gradients, modules, traced), *_without_masters(spec))
    return _with_results(noted, joint, inputs, kept, found)


Updated = tuple[Node, Mapping[str, Node]]
"""A parameter, and its state by slot."""


def _skip_update(add: Appender, applies: Node, old: Updated, updated: Updated) -> tuple[Node, dict[str, Node]]:
    """The values after an update that may be skipped; those that are rounded as they are stored know it already (`kept_update`)."""

    def choose(slot: str, before: Node, new: Node) -> Node:
        if new is before or new.target in IN_PLACE or slot == MASTER:
            return new
        return add.call(meshc.update_if.default, before, new, applies)

    state = {slot: choose(slot, old[1][slot], new) if slot in old[1] else new for slot, new in updated[1].items()}
    return choose("", old[0], updated[0]), state


def _refine_results(traced: TracedModel) -> TracedModel:
    """The phase with the decay of sparse lines in the gradients that the program returns."""
    joint, entered = traced.operators(), traced.operators().placeholders()
    add = Appender(joint.graph, "update" if traced.request.train else "backward")
    results, updates, sparse = list[Node](), dict(joint.updates), SparseGradients(add, traced)
    for port, node in zip(joint.outputs, joint.results(), strict=True):
        parameter = entered.get(key_of("parameter", port.name))
        if port.kind == "gradient" and parameter is not None:
            before = len(add.made)
            node = sparse.refine(port.name, parameter, node)
            updates |= dict.fromkeys(add.made[before:], port.name)
        results.append(node)
    set_results(joint.graph, results)
    return replace(traced, joint=replace(joint, updates=updates))


def _with_results(traced: TracedModel, joint: Joint, inputs: list[Port], kept: list[tuple[Port, Node]], found: Gradients) -> TracedModel:
    """The phase with a joint graph whose results are `kept`."""
    set_results(joint.graph, (node for _, node in kept))
    outputs = tuple(port for port, _ in kept)
    joint = replace(joint, inputs=tuple(inputs), outputs=outputs, updates=found.updates, constants=found.constants)
    return replace(traced, joint=joint)


def _refuse_frozen(names: list[str]) -> None:
    """Refuses a step of a model without trainable parameters, which torch would refuse in backward."""
    why = f"{join_names(names, 6)}: requires_grad is False" if names else "the model has no parameters"
    raise CompileError(
        f"there is nothing to train\n  why: {why}\n"
        "  what to do: requires_grad_(True) on what is to be trained, before meshc.compile; a model that is only to be evaluated is\n"
        "  compiled without a TrainStep, under torch.no_grad()"
    )


def _number_inputs(add: Appender, inputs: list[Port], spec: OptimizerSpec) -> list[dict[str, Node]]:
    found: list[dict[str, Node]] = [{} for _ in spec.groups]
    for group, row in zip(spec.groups, found, strict=True):
        for entry in group.numbers:
            row[entry] = add.placeholder(f"number_{group.index}_{entry}", (), torch.float64)
            inputs.append(Port("number", f"{group.index}.{entry}", (), torch.float64, of=f"{group.index}.{entry}"))
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


def _refuse_strange_or_idle(spec: OptimizerSpec, gradients: Mapping[str, Node], modules: Mapping[str, object]) -> None:
    """Refuses an optimizer that has none of the model's parameters, and parameters with a gradient whose optimizer is never stepped."""
    if not any(p is modules[name] for name in gradients for group in spec.groups for p in group.params):
        raise CompileError(
            f"{spec.optimizer} updates none of the model's parameters\n"
            "  what to do: build the optimizer from the parameters of the model that is compiled, as they are now"
        )
    holders = {id(parameter): holder for parameter, holder in spec.idle}
    faults = {name: holders[id(modules[name])] for name in gradients if id(modules[name]) in holders}
    if faults:
        raise CompileError(
            f"{join_names([*faults], 6)}: held by {_holders(faults)}, whose step is not called, so they would never be updated\n"
            f"  why: what steps is {spec.optimizer}\n"
            "  what to do: call its step too, or give TrainStep(optimizer=[...]) with all optimizers that are to step; parameters\n"
            "  that are to stay as they are: leave them out, or set requires_grad_(False)"
        )


def _refuse_unwritten(faults: Mapping[str, str]) -> None:
    if faults:
        raise CompileError(
            f"{join_names([*faults], 6)}: held by {_holders(faults)}, and have a gradient, but its step leaves them as they are\n"
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
        notes.append(f"no optimizer holds {join_names(free, 6)}: they have a gradient and are not updated")
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


def _holders(faults: Mapping[str, str]) -> str:
    return " and ".join(dict.fromkeys(faults.values()))


# Bias updates: routers' biases, moved after the optimizer's update towards experts that were chosen less than the mean.
#
#     routed:PATH = counts [experts]       becomes       buffer:bias = bias + u * sign(sum(counts) - counts * experts)
#
# Counts are a step's metrics (`count_experts.py`), over the whole batch, on every mesh and with any number of microbatches. They are
# integers, and so is the difference whose sign is taken.


def bias_updates(
    model: nn.Module, step: float, entered: Mapping[str, Node], counts: Mapping[str, Node], call: Callable[..., Node]
) -> list[tuple[Port, Node]]:
    """The biases after a step.

    entered, counts  placeholders by key; by path, how often each expert is chosen
    call             adds a node
    """
    made = []
    for path, name in biases_of(model).items():
        bias, tokens = entered.get(key_of("buffer", name)), counts.get(path)
        if bias is None or tokens is None:  # no routing depends on it
            continue
        found = record(bias)
        assert found.dtype is not None
        ahead = call(aten.sub.Tensor, call(aten.sum.default, tokens), call(aten.mul.Scalar, tokens, found.shape[0]))
        sign = call(aten._to_copy.default, call(aten.sign.default, ahead), dtype=found.dtype)
        made.append((Port("buffer", name, found.shape, found.dtype), call(aten.add.Tensor, bias, call(aten.mul.Tensor, sign, step))))
    return made


# Keep unchosen: parameters and state of experts that no row of a batch has chosen, unchanged by an update, as in torch.optim.
#
#     w, m, v, t = adam(w1, ..)        becomes        w = where(routed[3] > 0, w, w1), and so m, v, t
#
# Where a model's code does not call an expert, or a cluster of an adaptive softmax, its parameters have no gradient on one device, and an
# optimizer skips them: no decay, no step counted. A program has zero gradients there. How often each expert is chosen, over the whole batch
# and all microbatches, is in the graph already (`count_experts.py`); the rows of a cluster are counted here, by the mask that its product
# reads (`meshc/frontend/capture_patches.py`).


TURNED: Final = (aten.t.default, aten.permute.default, aten.transpose.int, aten._to_copy.default)
"""Operators that keep rows as they are, in another order of dims or another dtype."""

Places = Mapping[str, tuple[tuple[str, int], ...]]
"""By parameter: (path of a module with experts or clusters, number of the expert or cluster there)."""


class UnchosenExperts:
    """
    places    parameters of experts and clusters that may not be chosen
    counts    by path, the number of rows that have chosen each expert
    clusters  by place, the same numbers of a cluster, one for each call
    """

    def __init__(
        self, call: Callable[..., Node], places: Places, counts: Mapping[str, Node], clusters: Mapping[tuple[str, int], list[Node]]
    ) -> None:
        self.call, self.places, self.counts, self.clusters = call, places, counts, clusters
        self.chosen: dict[tuple[tuple[str, int], ...], Node] = {}

    def keep_state(
        self, name: str, old: Node, new: Node, state: Mapping[str, Node], after: Mapping[str, Node]
    ) -> tuple[Node, dict[str, Node]]:
        """A parameter and its state after an update."""
        places = self.places.get(name, ())
        if not places or new is old or any(path not in self.counts and (path, number) not in self.clusters for path, number in places):
            return new, dict(after)
        if SUM in after:
            _refuse_sums(name)
        if places not in self.chosen:
            found = [count for place in places for count in self._counts(*place)]
            self.chosen[places] = self.call(aten.gt.Scalar, reduce(partial(self.call, aten.add.Tensor), found), 0)
        chosen = self.chosen[places]
        slots = {slot: value if slot == GRADIENT else self._where(chosen, value, state[slot]) for slot, value in after.items()}
        return self._where(chosen, new, old), slots

    def _counts(self, path: str, number: int) -> list[Node]:
        return self.clusters.get((path, number)) or [self.call(aten.select.int, self.counts[path], 0, number)]

    def _where(self, chosen: Node, new: Node, old: Node) -> Node:
        assert record(new).dtype == record(old).dtype
        return new if new is old else self.call(aten.where.self, chosen, new, old)


def zero_gradient_notes(module: nn.Module, gradients: Iterable[str]) -> list[str]:
    """A note where a program returns gradients of parameters that may not be chosen: only an update within a program can skip them."""
    places = unchosen_parameters(module)
    names = [name for name in gradients if name in places]
    if not names:
        return []
    return [
        f"{join_names(names, 2)} {ZEROS} where no row of a batch chooses them, and on one device none: an optimizer with decay or "
        "moments steps them here, and passes them over there\n"
        "  what to do: train by meshc.TrainStep(model, optimizer=...), whose update passes them over too"
    ]


def rows_of_clusters(module: nn.Module, places: Places, entered: Mapping[str, Node], parts: bool) -> dict[tuple[str, int], list[Node]]:
    """By place, the number of targets in clusters of adaptive softmaxes at each call; only of clusters that nothing else calls."""
    found: dict[tuple[str, int], list[Node]] = {}
    for path, each in module.named_modules():
        for number in range(len(each.tail) if isinstance(each, nn.AdaptiveLogSoftmaxWithLoss) else 0):
            first = f"{path}.tail.{number}.0.weight".removeprefix(".")
            entry = entered.get(key_of("parameter", first))
            if first in places and entry is not None:
                masks = [_mask(product, weight) for weight in _as_laid_out(entry) for product in weight.users if _is_read(product)]
                if masks and None not in masks:
                    found[path, number] = [_count(mask, parts) for mask in dict.fromkeys(masks) if mask is not None]
    return found


def _as_laid_out(entry: Node) -> list[Node]:
    """A weight, and the same weight in another order of dims or another dtype."""
    turned = [user for user in entry.users if user.target in TURNED and record(user).phase == "forward"]
    return [entry, *(one for user in turned for one in _as_laid_out(user))]


def _is_read(node: Node) -> bool:
    return records(node)[0].phase == "forward" and node.target not in TURNED


def _mask(product: Node, weight: Node) -> Node | None:
    """The mask of the rows that a product with a weight reads; None where it reads all."""
    other = next((one for one in product.all_input_nodes if one is not weight), None)
    while other is not None and other.target in (*LAYOUT, *TURNED):
        other = other.all_input_nodes[0]
    return other.all_input_nodes[0] if other is not None and getattr(other.target, "overloadpacket", None) is aten.where else None


def _count(mask: Node, parts: bool) -> Node:
    beside = Beside(mask, record(mask).source, parts)
    return beside.whole(beside.call(aten.sum.default, mask))


def _refuse_sums(name: str) -> None:
    raise CompileError(
        f"{name} may be chosen by no row of a batch, and Options(training=Training(accumulate=True)) adds up gradients over calls\n"
        "  why: on one device it has a gradient then if any of those calls has chosen it, and is passed over if none has; which have is\n"
        "  not kept\n"
        "  what to do: TrainStep(..., microbatches=N), which adds up within a call, in the place of program.accumulate(...)"
    )
