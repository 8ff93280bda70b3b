"""torch.func transforms in a model or a loss (grad, vmap, jvp): contexts to trace them, the calls within them, values below their wrappers.

    _grad_increment_nesting();  x = _wrap_for_grad(x, 1)        from here on values are wrapped, a wrapper a level
    h = dropout(linear(x, w), 0.1)                              ^
    (g,) = _autograd_grad(h.sum(), x, create_graph=True)        ^  within
    _grad_decrement_nesting()                                   v  no longer

Dynamo writes transforms out as calls of the graph, which AOTAutograd runs like any others. meshc's operators have no rules for transforms:
no batched form, no tangents, and only autograd's gradients. So calls within transforms stay torch's own, which torch decomposes into
operators that have all of these. Random calls there, and attention, whose fast kernels have no second derivative, are in
`passes/trace/raise_ops.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Graph, Node

from meshc.private import FakeTensorMode
from meshc.replacements import replace_targets


def within_transforms(graph: Graph) -> frozenset[Node]:
    """The calls of a torch-level graph between the beginning and the end of a transform."""
    found, levels = set[Node](), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        levels += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        if levels and node.op in ("call_function", "call_method"):
            found.add(node)
    return frozenset(found)


def storage_of(node: Node) -> int | None:
    """The id of the storage of a node's value, below all wrappers of transforms; None for a value that is no tensor."""
    value = below_wrappers(node.meta.get("example_value"))
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def below_wrappers(value: Any) -> Any:
    """The value inside the wrappers of transforms: for vmap, the whole batch."""
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

    with replace_targets(cloned_input=copied_outside, forward_jacobian=eager_transforms.jacrev):  # a model has its own name for jacfwd
        yield


@contextmanager
def restore_levels() -> Iterator[None]:
    """A context for a trace, which ends the transforms that a failure has left open. Otherwise torch would take the rest of the process to
    be within one: no tensor would take a gradient, no checkpoint save anything, and no jvp begin."""
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
            if forward_ad._current_level < 0:  # the caller's own level
                with suppress(RuntimeError):  # no level was left open
                    torch._C._exit_dual_level(level=0)
