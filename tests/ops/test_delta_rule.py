"""The gated delta rule in chunks is its steps, one after another; its gradient is theirs; stretches compose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshc.ops.delta_rule import delta_rule, delta_rule_backward, delta_rule_end, delta_rule_ends, delta_rule_join

KEYS, VALUES = 4, 5


def drawn(size: int) -> list[Tensor]:
    """q, k, v, e, g, a state before, gradients of the output and of the last state."""
    generator = torch.Generator().manual_seed(size)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(2, 3, *shape, dtype=torch.float64, generator=generator)

    q, k, v = numbers(size, KEYS), torch.nn.functional.normalize(numbers(size, KEYS), dim=-1), numbers(size, VALUES)
    e, g = k * numbers(size, 1).sigmoid(), -numbers(size).abs()
    return [q, k, v, e, g, numbers(KEYS, VALUES), numbers(size, VALUES), numbers(KEYS, VALUES)]


def stepped(q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    state = k.new_zeros(*k.shape[:-2], KEYS, VALUES) if before is None else before
    found = []
    for t in range(k.shape[-2]):
        answer = e[..., t, None, :] @ state
        state = g[..., t, None, None].exp() * (state - k[..., t, :, None] * answer) + k[..., t, :, None] * v[..., t, None, :]
        found.append((q[..., t, None, :] @ state).squeeze(-2))
    return torch.stack(found, -2), state


@pytest.mark.parametrize("size", [1, 5, 64, 70, 150])
@pytest.mark.parametrize("begun", [False, True])
def test_steps_and_their_gradients(size: int, begun: bool) -> None:
    *operands, grad, after = drawn(size)
    given = [x.requires_grad_() for x in operands]
    call = given if begun else [*given[:5], None]
    wanted, found = stepped(*call), delta_rule(*call)
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its)
    leaves = given if begun else given[:5]
    pairs = zip(torch.autograd.grad(found, leaves, (grad, after)), torch.autograd.grad(wanted, leaves, (grad, after)), strict=True)
    for mine, its in pairs:
        torch.testing.assert_close(mine, its)


def test_the_gradient_of_one_result_alone() -> None:
    *operands, grad, after = drawn(5)
    given = [x.requires_grad_() for x in operands]
    for index, one in enumerate((grad, after)):
        pairs = (torch.autograd.grad(rule(*given)[index], given[1:5], one) for rule in (delta_rule, stepped))
        for mine, its in zip(*pairs, strict=True):
            torch.testing.assert_close(mine, its)


def test_the_gradient_by_differences() -> None:
    given = [x[:1, :1].requires_grad_() for x in drawn(67)[:6]]
    assert torch.autograd.gradcheck(lambda *call: delta_rule(*call), given, fast_mode=True)


def test_decays_beyond_the_range_of_numbers() -> None:
    """What is forgotten many times over between two positions is zero, not a quotient of zeros."""
    q, k, v, e, g, before, *_ = drawn(70)
    for mine, its in zip(delta_rule(q, k, v, e, g * 1000, before), stepped(q, k, v, e, g * 1000, before), strict=True):
        torch.testing.assert_close(mine, its)


def test_stretches_compose() -> None:
    """Three stretches, each from what those on one side of it come to, are the whole: forward and backward."""
    q, k, v, e, g, before, grad, after = drawn(150)
    wanted, last = delta_rule(q, k, v, e, g, before)
    backward = delta_rule_backward(grad, q, k, v, e, g, before, after)
    parts = [[x.split((30, 20, 100), 2)[place] for x in (grad, q, k, v, e, g)] for place in range(3)]
    products, ends, starts = (torch.stack(each) for each in zip(*(delta_rule_ends(*part) for part in parts), strict=True))
    for place, part in enumerate(parts):
        for mine, its in zip(delta_rule_end(*part[2:]), (products[place], ends[place]), strict=True):
            torch.testing.assert_close(mine, its)
    found, gradients = [], []
    for place, part in enumerate(parts):
        begin, behind = delta_rule_join(products, ends, before, place, False), delta_rule_join(products, starts, after, place, True)
        found.append(delta_rule(*part[1:], begin)[0])
        gradients.append(delta_rule_backward(*part, begin, behind)[:5])
    torch.testing.assert_close(torch.cat(found, 2), wanted)
    torch.testing.assert_close(delta_rule_join(products, ends, before, 3, False), last)
    torch.testing.assert_close(delta_rule_join(products, starts, after, -1, True), backward[5])
    for mine, its in zip(zip(*gradients, strict=True), backward, strict=False):
        torch.testing.assert_close(torch.cat(mine, 2), its)


def test_no_steps() -> None:
    q, k, v, e, g, before, grad, after = drawn(0)
    made, last = delta_rule(q, k, v, e, g, before)
    assert made.shape == v.shape
    torch.testing.assert_close(last, before)
    product, end = delta_rule_end(k, v, e, g)
    assert torch.equal(product, torch.eye(KEYS, dtype=torch.float64).expand(2, 3, KEYS, KEYS)) and not end.any()
    *gradients, first = delta_rule_backward(grad, q, k, v, e, g, before, after)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v, e, g)]
    torch.testing.assert_close(first, after)
