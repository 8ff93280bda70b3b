"""One parameter's update in operators, emitted through a callback that builds graph nodes or computes plain tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from meshc.errors import InputError
from meshc.ir.graph import results_of
from meshc.ir.keys import key_of, name_of
from meshc.ops import optim as _updates  # noqa: F401  registers the operators
from meshc.optimizer.spec import ADAM_NUMBERS, FIRST, SGD_NUMBERS, GroupSpec

Value = TypeVar("Value")
"""A value of an update: a graph node, or a tensor."""


def update_nodes(
    group: GroupSpec,
    param: Value,
    grad: Value,
    state: Mapping[str, Value],
    numbers: Mapping[str, Value],
    call: Callable[..., Value],
    like: Tensor | None = None,
) -> tuple[Value, dict[str, Value]]:
    """Write one parameter's update; returns its new value and its new state, one entry a slot.

    `param`, `grad`, the values of `state` and `numbers` are opaque: graph nodes, or tensors. `call(op, *args, **kwargs)` adds one operator.
    A traced update depends on the parameter's global shape and dtype, read from `like` (default: `param` itself).
    """
    if group.kind in ("adam", "adamw"):
        amsgrad = group.flag("amsgrad")
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()), "step")
        op = torch.ops.meshc.adam_amsgrad.default if amsgrad else torch.ops.meshc.adam.default
        given = [state[name] for name in names] + [numbers[name] for name in ADAM_NUMBERS]
        result = call(op, param, grad, *given, group.flag("decoupled"), group.flag("maximize"))
    elif group.kind == "sgd" and group.flag("momentum"):
        names = ("momentum_buffer", FIRST)
        given = [state[name] for name in names] + [numbers[name] for name in SGD_NUMBERS]
        result = call(torch.ops.meshc.sgd.default, param, grad, *given, group.flag("nesterov"), group.flag("maximize"))
    elif group.kind == "sgd":
        plain = call(torch.ops.meshc.sgd_plain.default, param, grad, numbers["lr"], numbers["weight_decay"], group.flag("maximize"))
        return plain, {}
    else:
        return _inline(group, param, grad, state, numbers, call, cast(Tensor, param) if like is None else like)
    return call(operator.getitem, result, 0), {name: call(operator.getitem, result, i) for i, name in enumerate(names, 1)}


def _inline(
    group: GroupSpec,
    param: Value,
    grad: Value,
    state: Mapping[str, Value],
    numbers: Mapping[str, Value],
    call: Callable[..., Value],
    like: Tensor,
) -> tuple[Value, dict[str, Value]]:
    update = group.traced.get((tuple(like.shape), like.dtype))
    if update is None:
        raise InputError(
            f"{group.optimizer}: no update was traced for a parameter of shape {tuple(like.shape)} and {like.dtype} in group "
            f"{group.index}. Pass the described parameter as `like`."
        )
    sources = {"param": param, "grad": grad}
    sources |= {key_of("state", name): value for name, value in state.items()} | {
        key_of("number", name): value for name, value in numbers.items()
    }
    values: dict[Node, Value] = {}
    inputs = iter(update.inputs)
    for node in update.graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = sources[next(inputs)]
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), cast(Callable[[Node], Argument], values.__getitem__))
            values[node] = call(node.target, *args, **kwargs)
    results = dict(zip(update.outputs, [values[node] for node in results_of(update.graph.graph)], strict=True))
    return results.pop("param"), {name_of(key): value for key, value in results.items()}
