"""Gradient hooks: users' hooks on a parameter's gradient, traced into the graph ahead of clipping and the update.

    w.register_hook(lambda g: 0.1 * g)                     g1 = mul(grad_w, 0.1)         w, m, v = adam(w, g1, m, v, ...)
    w.register_hook(lambda g: g + torch.randn_like(g))     d = normal(seed, ...)         g1 = add(grad_w, d)

Each parameter's hooks are run once, on a fake tensor; a tensor that they hold (a mask) is a constant of the program. A hook that reads
values of a gradient in Python, writes to the parameter, or only inspects the gradient is refused: a program would not repeat that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument

from meshc.errors import CompileError, MeshcError
from meshc.frontend.gradient_hooks import Drawing, Hooks
from meshc.frontend.reference_random import ANSWERS, by_name
from meshc.ir.graph import results_of
from meshc.private import FakeTensorMode

aten = torch.ops.aten


def apply_hooks(
    name: str,
    hooks: Hooks,
    parameter: Node,
    gradient: Node,
    like: Tensor,
    call: Callable[..., Node],
    seed_step: Callable[[], Node],
    constant: Callable[[Tensor], Node],
) -> Node:
    """The gradient after its hooks. `like`: a meta tensor of the parameter. `call`, `seed_step`, `constant`: create nodes of the graph."""
    traced = _trace_hooks(name, hooks, like)
    values: dict[Node, object] = {}
    given = iter((lambda: parameter, lambda: gradient, seed_step))
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            make = next(given)
            if node.users:
                values[node] = make()
        elif node.op == "get_attr":
            values[node] = constant(getattr(traced, str(node.target)))
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), cast(Callable[[Node], Argument], values.__getitem__))
            values[node] = call(node.target, *args, **kwargs)
    return cast(Node, values[results_of(traced.graph)[1]])


def _trace_hooks(name: str, hooks: Hooks, like: Tensor) -> GraphModule:
    """A graph of (parameter, gradient, seed and step), which returns the first two."""

    def function(parameter: Tensor, gradient: Tensor, seed_step: Tensor) -> tuple[Tensor, Tensor]:
        mine = parameter.clone()
        return mine, hooks(mine, gradient.clone())

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            fakes = [*(torch.empty(like.shape, dtype=like.dtype) for _ in range(2)), torch.zeros(2, dtype=torch.int64)]
            traced = make_fx(torch.func.functionalize(function, remove="mutations"))(*fakes)
            if any(_draws(node) for node in traced.graph.nodes):
                numbered = _StepDraws(name, traced).run
                traced = make_fx(torch.func.functionalize(numbered, remove="mutations"))(*fakes)
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
        if node.op == "call_function" and node.target in (aten.clone.default, aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
        elif node.op == "call_function" and node.target is aten.copy.default:
            here, source = node.meta["val"], node.args[1].meta["val"]
            if (here.shape, here.dtype) == (source.shape, source.dtype):
                node.replace_all_uses_with(node.args[1])
    traced.graph.eliminate_dead_code()


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _StepDraws(Interpreter):
    """Runs a graph with its random calls replaced by numbered draws of a step."""

    def __init__(self, name: str, traced: GraphModule) -> None:
        super().__init__(traced)
        self.name = name
        self.drawing: Drawing | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.drawing = Drawing(self.name, args[2])
        return super().run(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
            return super().call_function(target, args, dict(kwargs))
        answer = ANSWERS.get(target.overloadpacket)
        if answer is None or self.drawing is None:
            raise CompileError(f"{target} draws random numbers in a way that meshc does not define: use torch.randn_like or rand_like")
        return answer(self.drawing, target, by_name(target, args, kwargs))
