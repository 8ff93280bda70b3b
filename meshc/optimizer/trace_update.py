"""One parameter's update as a graph, traced from the optimizer's own `step` on fake tensors.

Each path through the step's branches on data is run once; `where` joins their results, and is then moved down to what differs in them.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument
from torch.optim import Optimizer

from meshc.errors import CompileError, MeshcError
from meshc.ir.graph import equal_calls
from meshc.ir.keys import key_of
from meshc.optimizer.group_counts import number_of
from meshc.optimizer.slots import create_state, private_copy
from meshc.optimizer.spec import (
    FIRST,
    NumberGuard,
    Slot,
    TracedUpdate,
    attributes,
    changed_names,
    group_numbers,
    is_torchs_own,
    token,
    without_hooks,
)
from meshc.optimizer.traced_numbers import NumbersAsTensors, UndecidedBranch
from meshc.private import FakeTensorMode
from meshc.replacements import replace_in

aten = torch.ops.aten
_MAX_BRANCHES = 5  # each doubles the paths


def trace_update(
    optimizer: Optimizer, shape: tuple[int, ...], dtype: torch.dtype, slots: Sequence[Slot]
) -> tuple[TracedUpdate, list[NumberGuard]]:
    guards: list[NumberGuard] = []
    raw = group_numbers(optimizer, optimizer.param_groups[0])
    counted = {number_of(slot) for slot in slots}
    present = {name: value.item() if isinstance(value, Tensor) else value for name, value in raw.items() if name not in counted}
    state = tuple(key_of("state", slot.name) for slot in slots)
    inputs, outputs = ("param", "grad", *state, *(key_of("number", name) for name in present)), ("param", *state)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(inputs, tensors, strict=True))

        def explore(decisions: tuple[bool, ...]) -> dict[str, Tensor]:
            if len(decisions) > _MAX_BRANCHES:
                raise CompileError(
                    f"{type(optimizer).__qualname__}.step branches more than {_MAX_BRANCHES} times on values that change from step "
                    "to step. Use torch.where, torch.maximum, torch.clamp instead of if, max, min."
                )
            try:
                return _one_path(optimizer, given, slots, present, decisions, guards)
            except UndecidedBranch as branch:
                condition = branch.condition
            then, otherwise = explore((*decisions, True)), explore((*decisions, False))
            return {name: torch.where(condition, then[name], otherwise[name]) for name in outputs}

        results = explore(())
        return tuple(results[name] for name in outputs)

    with FakeTensorMode(), torch.no_grad(), on_tensors(type(optimizer)):
        fakes = [torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)]
        fakes += [torch.empty(slot.size, dtype=slot.dtype) for slot in slots]
        fakes += [torch.empty((), dtype=torch.float64) for _ in present]
        try:
            traced = make_fx(torch.func.functionalize(function, remove="mutations"), decomposition_table=_SIMPLER)(*fakes)
        except MeshcError:
            raise
        except Exception as error:
            raise CompileError(
                f"{type(optimizer).__qualname__}.step could not be traced for a parameter of shape {shape}: {error}. It must be made "
                "of torch operations on parameters, gradients and state, with step counts in the state."
            ) from error
    return TracedUpdate(_simplify(traced, type(optimizer).__qualname__, inputs), inputs, outputs), guards


def _one_path(
    optimizer: Optimizer,
    given: Mapping[str, Tensor],
    slots: Sequence[Slot],
    present: Mapping[str, float],
    decisions: Sequence[bool],
    guards: list[NumberGuard],
) -> dict[str, Tensor]:
    """Run `step` once on copies of `given`, taking `decisions` at its branches; raises Branch at the first that is not decided."""
    name = type(optimizer).__qualname__
    param = given["param"].clone()
    hyper = {number: given[key_of("number", number)] for number in present}
    state: dict[str, object] = {}
    mode = NumbersAsTensors(name, decisions, param, given["grad"].clone())
    mode.guards = guards
    for number, tensor in hyper.items():
        mode.number(tensor, present[number], frozenset([number]))
        mode.known[id(tensor)].is_input = True
    created: dict[str, Tensor] | None = None
    started = True
    if any(slot.name == FIRST for slot in slots):
        first = given[key_of("state", FIRST)] != 0
        with mode:
            if is_torchs_own(optimizer):
                fresh = private_copy(optimizer, param, hyper, defaultdict(dict))
                create_state(fresh)
                created = fresh.state[param]
            else:
                started = not bool(first)
    for slot in slots:
        counted = number_of(slot)
        if counted is not None:
            hyper[counted] = mode.number(given[key_of("state", slot.name)].clone())
        if slot.is_hidden or not started:
            continue
        tensor = given[key_of("state", slot.name)].clone()
        if created is not None and slot.from_first_step:
            tensor = torch.where(first, created[slot.name], tensor)
        state[slot.name] = tensor
        if slot.python:
            mode.number(tensor)
        elif slot.shape == "scalar":
            mode.scalar_state[id(tensor)] = tensor
    twin = private_copy(optimizer, param, hyper, defaultdict(dict, {param: state}))
    watched = _snapshot(twin)
    with mode:
        without_hooks(type(twin).step)(twin)
    counts = {slot.name: twin.param_groups[0][entry] for slot in slots if (entry := number_of(slot)) is not None}
    kept = {f"group[{number_of(slot)!r}]" for slot in slots}
    before, after = ({key: value for key, value in seen.items() if key not in kept} for seen in (watched, _snapshot(twin)))
    _refuse_changed(name, before, after)
    return {"param": param, **_new_state(name, {**twin.state[param], **counts}, slots, given)}


def _eye(rows: int, columns: int | None = None, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    """`torch.eye` composed of operators that have sharding rules."""
    across = torch.arange(rows if columns is None else columns)
    return (torch.arange(rows).unsqueeze(1) == across).to(dtype or torch.get_default_dtype())


_SIMPLER: Final = {aten.eye.default: _eye, aten.eye.m: _eye}


def _refuse_changed(name: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    if changed := changed_names(before, after):
        raise CompileError(
            f"{name}.step changes {', '.join(changed)}, which is not state of a parameter and would be compiled in as a constant\n"
            "  what to do: keep counts and averages in optimizer.state[parameter]; a count for all of a group in the group, where it\n"
            "  stands from the start (group['count'] = 0 in __init__, group['count'] += 1 in step); a rate by step is that of a\n"
            "  torch.optim.lr_scheduler"
        )


def _new_state(name: str, final: dict[str, Tensor | float], slots: Sequence[Slot], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A parameter's state after a step, by slot name, in the dtypes of the slots."""
    results: dict[str, Tensor] = {}
    for slot in slots:
        if slot.name == FIRST:
            results[key_of("state", FIRST)] = torch.zeros_like(given[key_of("state", FIRST)])
            continue
        value = final.pop(slot.name)
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=slot.dtype)
        results[key_of("state", slot.name)] = value if value.dtype == slot.dtype else value.to(slot.dtype)
    if final:
        raise CompileError(f"{name}.step creates state {', '.join(map(repr, final))} after its first step; create all state in the first.")
    return results


def _snapshot(twin: Optimizer) -> dict[str, Hashable]:
    """All attributes outside the parameter's state, to name those that a step changes."""
    seen = attributes(twin, "self") | {f"group[{k!r}]": token(v) for k, v in twin.param_groups[0].items() if k != "params"}
    return seen | {f"state[{k!r}]": token(v) for k, v in twin.state.items() if not isinstance(k, Tensor)}


# Tidying a traced graph.


def _simplify(traced: GraphModule, name: str, inputs: Sequence[str]) -> GraphModule:
    """Drop copies, merge equal nodes, move `where` from the results of two branches to what differs in them; placeholders get names."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.users:
            raise CompileError(
                f"{name}.step uses a tensor that is not its parameter's, its gradient's or its state's. Keep it in "
                "optimizer.state[parameter]."
            )
        if node.op == "call_function" and node.target in _COPIES:
            source = node.args[_COPIES[node.target]]
            here, there = node.meta["val"], source.meta["val"]
            if (here.shape, here.dtype) == (there.shape, there.dtype):
                node.replace_all_uses_with(source)
    _merge_equal(graph)
    sunk: dict[tuple[Argument, Node, Node], Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.where.self:
            _, then, otherwise = node.args
            both = isinstance(then, Node) and isinstance(otherwise, Node)
            if both and (merged := _sink(node, then, otherwise, sunk)) is not None:
                node.replace_all_uses_with(merged)
    _merge_equal(graph)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr"):
            graph.erase_node(node)
    named = Graph()
    copies: dict[Node, Node] = {}
    remaining = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = named.placeholder(re.sub(r"\W", "_", next(remaining)))
            copies[node].meta.update(node.meta)
        else:
            copies[node] = named.node_copy(node, copies.__getitem__)
    return GraphModule(torch.nn.Module(), named, f"{name}Update")


# Operators that return one of their arguments (its position) where neither shape nor dtype changes: nothing is written in a traced graph.
_COPIES = {
    aten.clone.default: 0,
    aten.detach.default: 0,
    aten.view.default: 0,
    aten._to_copy.default: 0,
    aten.copy.default: 1,
}


def _merge_equal(graph: Graph) -> None:
    for node, first in equal_calls(graph.nodes):
        node.replace_all_uses_with(first)


def _sink(at: Node, then: Node, otherwise: Node, sunk: dict[tuple[Argument, Node, Node], Node]) -> Node | None:
    """`where(c, f(x), f(y))` as `f(where(c, x, y))`; None unless `then` and `otherwise` are the same operation on values of equal type.
    `at`: the `where`, whose condition is c."""
    if then is otherwise:
        return then
    key = at.args[0], then, otherwise
    if key in sunk:
        return sunk[key]
    same = then.op == otherwise.op == "call_function" and then.target is otherwise.target and len(then.args) == len(otherwise.args)
    if not same or repr(then.kwargs) != repr(otherwise.kwargs) or torch.Tag.nondeterministic_seeded in getattr(then.target, "tags", ()):
        return None
    differ = [i for i, (a, b) in enumerate(zip(then.args, otherwise.args, strict=True)) if a is not b and repr(a) != repr(b)]
    if len(differ) != 1:
        return None
    (position,) = differ
    a, b = then.args[position], otherwise.args[position]
    if not all(isinstance(v, Node | float | int) and not isinstance(v, bool) for v in (a, b)):
        return None
    value = _choose(at, cast(Node | float, a), cast(Node | float, b), sunk)
    if value is None:
        return None
    with at.graph.inserting_before(at):
        args = (*then.args[:position], value, *then.args[position + 1 :])
        sunk[key] = node = at.graph.create_node("call_function", then.target, args, dict(then.kwargs))
    node.meta.update(then.meta)
    return node


def _choose(at: Node, a: Node | float, b: Node | float, sunk: dict[tuple[Argument, Node, Node], Node]) -> Node | None:
    if isinstance(a, Node) and isinstance(b, Node):
        if not isinstance(a.meta["val"], Tensor):  # an operator of several results
            return _sink(at, a, b, sunk) if a.target is b.target else None
        if a.meta["val"].shape != b.meta["val"].shape or a.meta["val"].dtype != b.meta["val"].dtype:
            return None
        if (deeper := _sink(at, a, b, sunk)) is not None:
            return deeper
        op = aten.where.self
    elif isinstance(a, Node) and a.meta["val"].dim() == 0 and a.meta["val"].dtype == torch.float64:
        op = aten.where.ScalarOther
    elif isinstance(b, Node) and b.meta["val"].dim() == 0 and b.meta["val"].dtype == torch.float64:
        op = aten.where.ScalarSelf
    else:
        return None
    with at.graph.inserting_before(at):
        node = at.graph.call_function(op, (at.args[0], a, b))
    node.meta["val"] = next(one for one in (a, b) if isinstance(one, Node)).meta["val"]
    return node


# Python's `math` functions on 0-dim tensors, for the modules of an optimizer while its step is traced.
#
#     lr / math.sqrt(state["step"])        x ** 0.5          on a 0-dim float64 tensor, as Python's float would be
#     1 - math.pow(step, decay)            x ** y
#
# The names in the modules of an optimizer's class are replaced during a trace, and restored after it.


_TENSORS: Final[dict[str, Callable[..., Tensor]]] = {
    **{name: getattr(torch, name) for name in "sqrt exp expm1 log1p log2 log10 cos sin tanh pow isnan isinf isfinite".split()},
    "fabs": torch.abs,
    "log": lambda x, base=None: torch.log(x) if base is None else torch.log(x) / math.log(base),
}
"""Name of a `math` function of one or two numbers -> the same function on tensors."""


def _for_number_or_tensor(name: str) -> Callable[..., Any]:
    plain, tensors = getattr(math, name), _TENSORS[name]

    def function(*numbers: Any) -> Any:
        return tensors(*numbers) if any(isinstance(number, Tensor) for number in numbers) else plain(*numbers)

    return function


_FUNCTIONS: Final = {name: _for_number_or_tensor(name) for name in _TENSORS}
_MATH: Final = ModuleType("math")
_MATH.__dict__.update({**vars(math), **_FUNCTIONS})
_REPLACED: Final = {math: _MATH, **{getattr(math, name): function for name, function in _FUNCTIONS.items()}}
_KINDS: Final = (ModuleType, type(math.sqrt))


@contextmanager
def on_tensors(kind: type) -> Iterator[None]:
    """Context in which `math` and its functions, in the modules of `kind` and its bases, accept 0-dim tensors. Torch's own modules are left
    unchanged: they read values where they need them."""
    names = {base.__module__ for base in kind.__mro__} - {"builtins"}
    modules = [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]
    found = [(module, key, value) for module in modules for key, value in vars(module).items() if type(value) in _KINDS]
    with replace_in("optimizer_math", [(module, key, _REPLACED[value]) for module, key, value in found if value in _REPLACED]):
        yield
