"""A recurrence is its steps, one after another, however they are taken; its gradient is theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshc.ops.recurrence import recurrence, recurrence_backward, recurrence_end, stretches


def drawn(size: int, dim: int, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    shape = [3, 2, 4]
    shape[dim] = size
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(count)]


def stepped(a: Tensor, b: Tensor, dim: int, before: Tensor | None = None) -> Tensor:
    state, found = torch.zeros_like(b.select(dim, 0)) if before is None else before.squeeze(dim), []
    for factor, term in zip(a.unbind(dim), b.unbind(dim), strict=True):
        state = factor * state + term
        found.append(state)
    return torch.stack(found, dim)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("size", [1, 2, 5, 9, 12])
def test_steps_and_their_gradients(size: int, dim: int) -> None:
    a, b, grad = drawn(size, dim, 3)
    a, b = a.requires_grad_(), b.requires_grad_()
    wanted, found = stepped(a, b, dim), recurrence(a, b, None, dim)
    torch.testing.assert_close(found, wanted)
    pairs = zip(torch.autograd.grad(found, (a, b), grad), torch.autograd.grad(wanted, (a, b), grad), strict=True)
    for of_found, of_wanted in pairs:
        torch.testing.assert_close(of_found, of_wanted)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("size", [1, 2, 5, 9, 12])
def test_stretches_at_once(size: int, dim: int) -> None:
    a, b = drawn(size, dim)
    torch.testing.assert_close(stretches(a, b, None, dim), stepped(a, b, dim))
    before = drawn(1, dim, 1)[0]
    torch.testing.assert_close(stretches(a, b, before, dim), stepped(a, b, dim, before))


def test_stretches_compose() -> None:
    """Two halves, each from what the other comes to, are the whole: forward and backward."""
    a, b, grad = drawn(9, 1, 3)
    h = recurrence(a, b, None, 1)
    parts = [(a[:, :4], b[:, :4], grad[:, :4]), (a[:, 4:], b[:, 4:], grad[:, 4:])]
    product, last = recurrence_end(*parts[0][:2], 1, False)
    torch.testing.assert_close(last, h[:, 3:4])
    torch.testing.assert_close(product, a[:, :4].prod(1, keepdim=True))
    torch.testing.assert_close(recurrence(*parts[1][:2], last, 1), h[:, 4:])

    wanted = recurrence_backward(grad, a, h, None, None, 1)
    late, _, its_grad = parts[1]
    _, after = recurrence_end(late, late * its_grad, 1, True)
    first = recurrence_backward(parts[0][2], parts[0][0], h[:, :4], None, after, 1)
    second = recurrence_backward(its_grad, late, h[:, 4:], last, None, 1)
    for whole, early, later in zip(wanted, first, second, strict=True):
        torch.testing.assert_close(torch.cat([early, later], 1), whole)


def test_no_steps() -> None:
    nothing = torch.empty(3, 0)
    assert recurrence(nothing, nothing, None, 1).shape == stretches(nothing, nothing, None, 1).shape == (3, 0)
    product, last = recurrence_end(nothing, nothing, 1, False)
    assert product.tolist() == [[1.0]] * 3 and last.tolist() == [[0.0]] * 3
