"""Transforms of torch.func in a graph, and what a failure within them leaves."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from meshc.frontend.inner_transforms import below_wrappers, restore_levels, within_transforms


def test_calls_between_where_a_transform_begins_and_ends_stand_within() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for target, args in [
        (torch.sin, (x,)), (torch._C._functorch._grad_increment_nesting, ()), (torch.cos, (x,)),
        (torch._C._functorch._vmap_increment_nesting, (3, "error")), (torch.tan, (x,)),
        (torch._C._functorch._vmap_decrement_nesting, ()), (torch.sinh, (x,)), (torch._C._functorch._grad_decrement_nesting, ()),
        (torch.cosh, (x,)),
    ]:  # fmt: skip
        graph.call_function(target, args)
    names = {node.target.__name__ for node in within_transforms(graph)}
    assert {"cos", "tan", "sinh"} <= names and names.isdisjoint({"sin", "cosh"})


def test_below_wrappers_lies_all_that_vmap_maps() -> None:
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(below_wrappers(x))
        return x.square().sum()

    x = torch.ones(3, 2)
    vmap(grad(function))(x)
    assert seen[0].shape == (3, 2) and seen[0].data_ptr() == x.data_ptr() and below_wrappers(4) == 4


def _fail_within() -> None:
    with pytest.raises(KeyError), restore_levels():
        torch._C._functorch._grad_increment_nesting()
        torch._C._autograd._saved_tensors_hooks_disable("within")
        torch._C._functorch._jvp_increment_nesting()
        if forward_ad._current_level < 0:
            torch._C._enter_dual_level()
        raise KeyError


def test_a_failure_leaves_no_transform_behind() -> None:
    """torch took gradients by themselves, checkpoints and tangents for what stands within the transform that has failed."""
    _fail_within()
    x, one = torch.ones(2).requires_grad_(), torch.ones(2)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.cos(one))
    assert torch.equal(jvp(torch.sin, (one,), (one,))[1], torch.cos(one))


def test_what_the_caller_stands_within_stays() -> None:
    one = torch.ones(2)
    with forward_ad.dual_level(), torch.autograd.graph.disable_saved_tensors_hooks("the caller's"):
        dual = forward_ad.make_dual(one, one)
        _fail_within()
        assert torch.equal(forward_ad.unpack_dual(torch.sin(dual)).tangent, torch.cos(one))
        with pytest.raises(RuntimeError, match="within"):
            checkpoint(torch.sin, one.clone().requires_grad_(), use_reentrant=False)  # torch has the text of who forbids it last
