"""Dropout: what it keeps, how it rounds, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from meshc.ops import random
from tests.ops.drawn import FLOATS, ops, seeded


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_keeps_one_minus_p(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(1 << 17).to(dtype)
    out, mask = ops.dropout(x, seeded(), 1, p, x.shape, x.shape, [0])
    assert out.dtype == dtype and mask.dtype == torch.bool
    assert abs(mask.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel()) + 1e-12
    assert torch.equal(mask, random.keep_mask(seeded(), 1, p, x.shape))
    assert torch.equal(mask, random.uniform(seeded(), 1, x.shape) >= random.keep_threshold(1 - p) * 2.0**-24)
    expected = torch.where(mask, x.double() / (1 - p), 0.0) if p < 1 else torch.zeros(x.shape, dtype=torch.float64)
    torch.testing.assert_close(out, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_dropped_values_are_zero_whatever_they_were() -> None:
    x = torch.full((1000,), math.nan)
    assert (random.dropout(x, seeded(), 0, 0.5)[~random.keep_mask(seeded(), 0, 0.5, (1000,))] == 0).all()
    assert (random.dropout(x, seeded(), 0, 1.0) == 0).all()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.7, 0.999, 1.0, 2**-25, 3 * 2**-25, 1 / 3])
def test_keeping_and_dropping_round_alike(p: float) -> None:
    """torch's dropout hands 1 - p to bernoulli_, which the reference turns into keep_mask(1 - (1 - p))."""
    assert random.keep_threshold(1.0 - p) == random.keep_threshold(1.0 - (1.0 - (1.0 - p)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dropout_derivative(dtype: torch.dtype) -> None:
    x = torch.randn(6, 5, dtype=dtype).t().requires_grad_()  # not contiguous
    out = random.dropout(x, seeded(), 0, 0.4)
    grad = torch.randn(out.shape, dtype=dtype)
    out.backward(grad)
    torch.testing.assert_close(x.grad, torch.where(random.keep_mask(seeded(), 0, 0.4, x.shape), grad / 0.6, 0).to(dtype))


def test_dropout_differentiates_twice() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: random.dropout(x, seeded(), 0, 0.4), x)
    assert torch.autograd.gradgradcheck(lambda x: random.dropout(x, seeded(), 0, 0.4), x)


def test_operators_are_registered_as_torch_wants() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    torch.library.opcheck(ops.dropout.default, (x, seeded(), 0, 0.3, [35], [35], [0]))
    torch.library.opcheck(ops.dropout_backward.default, (x, x.detach() > 0, 0.3))
    torch.library.opcheck(ops.keep_mask.default, (seeded(), 0, 0.3, [5, 7], [5, 7], [0, 0]))
    torch.library.opcheck(ops.uniform.default, (seeded(), 0, [5, 7], [5, 7], [0, 0], torch.float32))
    torch.library.opcheck(ops.normal.default, (seeded(), 0, [5, 7], [5, 7], [0, 0], torch.float64))


def test_one_node_forward_and_one_backward() -> None:
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_function

    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    x = torch.randn(4, 4, requires_grad=True)
    compiled = aot_function(lambda x, s: random.dropout(x * 2, s, 0, 0.5), fw_compiler=record, bw_compiler=record)
    compiled(x, seeded()).sum().backward()
    assert targets.count("meshc.dropout.default") == targets.count("meshc.dropout_backward.default") == 1
    assert len([target for target in targets if "bernoulli" in target or "where" in target]) == 0
    torch.testing.assert_close(x.grad, random.keep_mask(seeded(), 0, 0.5, x.shape) * 4.0)
