"""From a call to the ATen nodes that a program would hold, with the values that each of them works on.

The graph is AOTAutograd's, forward and backward together, under the decompositions of `meshc.passes.trace.decompositions`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._higher_order_ops.effects import with_effects
from torch.fx import Interpreter, Node
from torch.fx.node import Argument, Target

from meshc.passes.trace.decompositions import decompositions
from meshc.testing.brute_force import Sample
from tests.conformance.torch_samples import Call

aten = torch.ops.aten
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Their results hold anything."""
SILENT = {aten._assert_tensor_metadata.default, aten._assert_async.default, aten._assert_async.msg}
"""Nodes that make nothing; programs have none of them."""


class NotCapturable(Exception):
    """The call has no graph of fixed shapes."""


def nodes(call: Call) -> list[Sample]:
    """The calls of ATen operators that `call` and its gradient come to. Raises NotCapturable."""
    try:
        module = aot_export_joint_simple(
            call.function, list(call.tensors), trace_joint=call.differentiable, decompositions=decompositions()
        )
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise NotCapturable(f"{type(error).__name__}: {text[0][:100]}") from error
    generator = torch.Generator().manual_seed(0)
    placeholders = module.graph.find_nodes(op="placeholder")
    values = [torch.tensor([]) for node in placeholders if _orders_checks(node)]
    values += [tensor.detach() for tensor in call.tensors]
    values += [_random(node.meta["val"], generator) for node in placeholders[len(values) :]]
    recorder = _Recorder(module)
    with torch.no_grad():
        recorder.run(*values)
    return recorder.found


def _orders_checks(placeholder: Node) -> bool:
    """Whether it is a token, which stands before the call's tensors if operators that only check are kept in their order."""
    return any(user.target is with_effects and user.args[0] is placeholder for user in placeholder.users)


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """A tangent."""
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)


class _Recorder(Interpreter):
    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[Sample] = []

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        if target in (aten.view.default, aten._unsafe_view.default):
            target = aten.reshape.default  # as programs have it: they know no strides
        if target is with_effects:
            return args[0], None
        if target is not operator.getitem and target not in SILENT:
            self.found.append(Sample(target, args, dict(kwargs), defined=target not in EMPTY))
        return super().call_function(target, args, kwargs)


def said(sample: Sample) -> str:
    """What makes two calls the same to a rule: operator, shapes, dtypes, and all that is no tensor."""
    return f"{sample.op}{_said(sample.args)}{_said(sample.kwargs)}"


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_said, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{key}={_said(item)}' for key, item in value.items())})"
    assert not isinstance(value, Node)
    return repr(value)
