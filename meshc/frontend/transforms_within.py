"""Transforms of torch.func that a model or a loss applies within (grad, vjp, vmap, jvp, ...): Dynamo writes them out as calls of the graph,
and AOTAutograd runs those as any others.

    _grad_increment_nesting();  x = _wrap_for_grad(x, 1)        from here on values are wrapped, a wrapper a level
    h = dropout(linear(x, w), 0.1)                              ^
    (g,) = _autograd_grad(h.sum(), x, create_graph=True)        ^  within
    _grad_decrement_nesting()                                   v  no longer

meshc's operators have no rules for transforms: no batched form, no tangents, and gradients that are autograd's alone. So what stands within
stays torch's own call, which torch takes apart into operators that have all of these. What draws there, and attention, whose fast kernels
have no second derivative, is in `passes/trace/transformed_calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Graph, Node

from meshc.private import FakeTensorMode


def within_transforms(graph: Graph) -> frozenset[Node]:
    """The calls of a torch-level graph between where a transform begins and where it ends."""
    found, levels = set[Node](), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        levels += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        if levels and node.op in ("call_function", "call_method"):
            found.add(node)
    return frozenset(found)


def storage_of(node: Node) -> int | None:
    """The memory that a node's value lies in, below all wrappers of transforms; None of what is no tensor."""
    value = below_wrappers(node.meta.get("example_value"))
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def below_wrappers(value: Any) -> Any:
    """What the wrappers of transforms hold: of what vmap maps, all of it."""
    while isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


@contextmanager
def traced_transforms() -> Iterator[None]:
    """A context for tracing.

    A tensor from outside that is first read within a transform, as the parameters of a module for which `functional_call` has others, is
    copied for the tracer as it is outside. And `hessian` is `jacrev(jacrev(f))`, not `jacfwd(jacrev(f))`: torch's fake tensors have no
    tangents for all directions at once of what a gradient makes.
    """
    from meshc.private import eager_transforms, outside_transforms, variables

    copied = variables.builder._clone_input

    def copied_outside(value: Any, fake_mode: FakeTensorMode | None) -> Any:
        with outside_transforms():
            return copied(value, fake_mode)

    with (
        mock.patch.object(variables.builder, "_clone_input", copied_outside),
        mock.patch.object(eager_transforms, "jacfwd", eager_transforms.jacrev),  # what hessian calls; a model has its own name for jacfwd
    ):
        yield


@contextmanager
def restore_levels() -> Iterator[None]:
    """Around a trace: what a failure has left of a transform is ended, or torch would take the rest of the process to stand within: no
    tensor would take a gradient by itself, no checkpoint save anything, and no jvp begin."""
    levels = torch._C._functorch.get_dynamic_layer_stack_depth()
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        if torch._C._functorch.get_dynamic_layer_stack_depth() > levels:
            while torch._C._functorch.get_dynamic_layer_stack_depth() > levels:
                torch._C._functorch.pop_dynamic_layer_stack()
            if forbidden is None:
                torch._C._autograd._saved_tensors_hooks_enable()
            if forward_ad._current_level < 0:  # that of the caller's own
                with suppress(RuntimeError):  # there is none that it has left
                    torch._C._exit_dual_level(level=0)
