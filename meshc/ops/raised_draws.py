"""Torch's random-tensor functions and methods in meshc operators, with two more keywords, `seed_step` and `call`.

They take no `device`, `layout` or `out`: `passes/trace/stand_ins.py` handles these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from meshc.errors import CompileError
from meshc.ir.functions import Function, Target
from meshc.ops import distributions
from meshc.ops.distributions import Draws
from meshc.ops.random import bernoulli, keep_mask, normal, uniform

functional = torch.nn.functional
BOUND: Final = "  what to do: pass a number, as randint_like(x, 10), or draw outside the model and pass the result in"


def _of_size(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw_tensor(size: Sequence[int], *, dtype: torch.dtype | None = None, seed_step: Tensor, call: int) -> Tensor:
        return draw(seed_step, call, list(size), dtype or torch.get_default_dtype())

    return draw_tensor


def _like_input(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw_tensor(input: Tensor, *, dtype: torch.dtype | None = None, seed_step: Tensor, call: int) -> Tensor:
        return draw(seed_step, call, input.shape, dtype or input.dtype)

    return draw_tensor


def _raised_bernoulli(input: Tensor, p: Tensor | float | None = None, *, seed_step: Tensor, call: int) -> Tensor:
    if p is None:
        return bernoulli(seed_step, call, input)
    if isinstance(p, Tensor):
        return bernoulli(seed_step, call, p.detach().expand(input.shape)).to(input.dtype)
    return keep_mask(seed_step, call, 1.0 - p, input.shape).to(input.dtype)


def _raised_normal(
    mean: Tensor | float, std: Tensor | float = 1.0, size: Sequence[int] = (), *, dtype: torch.dtype | None = None,
    seed_step: Tensor, call: int,
) -> Tensor:  # fmt: skip
    given = [value.detach() for value in (mean, std) if isinstance(value, Tensor)]
    mean, std = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))
    shape = list(torch.broadcast_shapes(*(value.shape for value in given))) if given else list(size)
    dtype = given[0].dtype if given else dtype or torch.get_default_dtype()
    return distributions.normal(Draws.of(seed_step, call, shape), mean, std, dtype)


def _raised_randint(
    *, low: int = 0, high: int, size: Sequence[int], dtype: torch.dtype | None = None, seed_step: Tensor, call: int
) -> Tensor:  # fmt: skip
    return distributions.integers(Draws.of(seed_step, call, list(size)), int(low), int(high), dtype or torch.int64)


def _raised_randint_like(
    input: Tensor, *, low: int = 0, high: int | Tensor, dtype: torch.dtype | None = None, seed_step: Tensor, call: int
) -> Tensor:  # fmt: skip
    if isinstance(high, Tensor):
        raise CompileError("randint_like() with a tensor for its bound draws in a way that meshc has no operator for\n" + BOUND)
    return distributions.integers(Draws.of(seed_step, call, input.shape), int(low), int(high), dtype or input.dtype)


def _raised_randperm(n: int, *, dtype: torch.dtype | None = None, seed_step: Tensor, call: int) -> Tensor:
    return distributions.permutation(Draws.of(seed_step, call, [n]), dtype or torch.int64)


def _raised_multinomial(input: Tensor, num_samples: int, replacement: bool = False, *, seed_step: Tensor, call: int) -> Tensor:
    draws = Draws.of(seed_step, call, distributions.multinomial_shape(list(input.shape), num_samples, replacement))
    return distributions.multinomial(draws, input, num_samples, replacement)


def _raised_rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False, *,
    seed_step: Tensor, call: int,
) -> Tensor:  # fmt: skip
    out = input * distributions.rrelu_slopes(Draws.of(seed_step, call, input.shape), input, lower, upper)
    return input.copy_(out) if inplace else out


def _raised_gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1, *, seed_step: Tensor, call: int
) -> Tensor:
    """As in torch.nn.functional, where `eps` is ignored too."""
    noise = -distributions.exponential(Draws.of(seed_step, call, logits.shape), 1.0, logits.dtype).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter(dim, index, 1.0) - soft.detach() + soft


def _fill_with_draws(values: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method that overwrites its tensor with draws; it takes all its numbers by position, in torch's order (one is called `from`)."""

    def fill(input: Tensor, *numbers: float, seed_step: Tensor, call: int) -> Tensor:
        return input.copy_(values(Draws.of(seed_step, call, input.shape), *numbers, input.dtype))

    return fill


def _raised_bernoulli_(input: Tensor, p: Tensor | float = 0.5, *, seed_step: Tensor, call: int) -> Tensor:
    return input.copy_(_raised_bernoulli(input, p, seed_step=seed_step, call=call))


RAISED: dict[Target, Function] = {
    torch.rand: _of_size(uniform),
    torch.randn: _of_size(normal),
    torch.rand_like: _like_input(uniform),
    torch.randn_like: _like_input(normal),
    torch.bernoulli: _raised_bernoulli,
    torch.normal: _raised_normal,
    torch.randint: _raised_randint,
    torch.randint_like: _raised_randint_like,
    torch.randperm: _raised_randperm,
    torch.multinomial: _raised_multinomial,
    functional.rrelu: _raised_rrelu,
    torch.rrelu: _raised_rrelu,
    functional.gumbel_softmax: _raised_gumbel_softmax,
    "bernoulli": _raised_bernoulli,
    "multinomial": _raised_multinomial,
    "bernoulli_": _raised_bernoulli_,
    "uniform_": _fill_with_draws(distributions.uniform),
    "normal_": _fill_with_draws(distributions.normal),
    "exponential_": _fill_with_draws(distributions.exponential),
    "log_normal_": _fill_with_draws(distributions.log_normal),
    "cauchy_": _fill_with_draws(distributions.cauchy),
    "geometric_": _fill_with_draws(distributions.geometric),
}
"""Torch function, or a method's name -> the same with torch's parameter names, `seed_step` and `call`."""
