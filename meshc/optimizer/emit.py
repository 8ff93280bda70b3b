"""One parameter's update in operators, emitted through a callback that builds graph nodes or computes plain tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from meshc.errors import InputError
from meshc.ir.graph import placeholders, results_of
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
    if group.kind == "other":
        sources = {"param": param, "grad": grad, **{key_of("state", name): value for name, value in state.items()}}
        sources |= {key_of("number", name): value for name, value in numbers.items()}
        return _inline(group, sources, call, cast(Tensor, param) if like is None else like)
    ops = torch.ops.meshc
    call_form: tuple[Any, Sequence[str], Sequence[str], Sequence[str]]
    if group.kind == "sgd" and group.flag("momentum"):
        call_form = ops.sgd, ("momentum_buffer", FIRST), SGD_NUMBERS, ("nesterov", "maximize")
    elif group.kind == "sgd":
        call_form = ops.sgd_plain, (), ("lr", "weight_decay"), ("maximize",)
    elif group.flag("amsgrad"):
        call_form = ops.adam_amsgrad, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"), ADAM_NUMBERS, ("decoupled", "maximize")
    else:
        call_form = ops.adam, ("exp_avg", "exp_avg_sq", "step"), ADAM_NUMBERS, ("decoupled", "maximize")
    op, names, read, flags = call_form
    given = [*(state[name] for name in names), *(numbers[name] for name in read), *map(group.flag, flags)]
    result = call(op.default, param, grad, *given)
    if not names:
        return result, {}
    return call(operator.getitem, result, 0), {name: call(operator.getitem, result, i) for i, name in enumerate(names, 1)}


def _inline(group: GroupSpec, sources: Mapping[str, Value], call: Callable[..., Value], like: Tensor) -> tuple[Value, dict[str, Value]]:
    update = group.traced.get((tuple(like.shape), like.dtype))
    if update is None:
        raise InputError(
            f"{group.optimizer}: no update was traced for a parameter of shape {tuple(like.shape)} and {like.dtype} in group "
            f"{group.index}. Pass the described parameter as `like`."
        )
    graph = update.graph.graph
    values: dict[Node, Value] = dict(zip(placeholders(graph), map(sources.__getitem__, update.inputs), strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), cast(Callable[[Node], Argument], values.__getitem__))
            values[node] = call(node.target, *args, **kwargs)
    results = dict(zip(update.outputs, [values[node] for node in results_of(graph)], strict=True))
    return results.pop("param"), {name_of(key): value for key, value in results.items()}
