"""Torch's functions and methods that make random tensors, in meshc's operators: each takes two more keywords, `seed_step` and `call`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshc.ir.functions import Function, Target
from meshc.ops import distributions
from meshc.ops.distributions import Draws
from meshc.ops.random import bernoulli, keep_mask, normal, uniform

functional = torch.nn.functional


def _shape(size: tuple[Any, ...]) -> list[int]:
    return list(size[0]) if len(size) == 1 and not isinstance(size[0], int) else list(size)


def _raised_rand(*size: int, seed_step: Tensor, call: int, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return uniform(seed_step, call, _shape(size), dtype or torch.get_default_dtype())


def _raised_randn(*size: int, seed_step: Tensor, call: int, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return normal(seed_step, call, _shape(size), dtype or torch.get_default_dtype())


def _raised_rand_like(input: Tensor, *, seed_step: Tensor, call: int, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return uniform(seed_step, call, input.shape, dtype or input.dtype)


def _raised_randn_like(input: Tensor, *, seed_step: Tensor, call: int, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return normal(seed_step, call, input.shape, dtype or input.dtype)


def _raised_bernoulli(input: Tensor, p: float | None = None, *, seed_step: Tensor, call: int, **_: object) -> Tensor:
    if p is None:
        return bernoulli(seed_step, call, input)
    return keep_mask(seed_step, call, 1.0 - p, input.shape).to(input.dtype)


def _raised_normal(
    mean: Tensor | float, std: Tensor | float = 1.0, size: object = None, *, seed_step: Tensor, call: int,
    dtype: torch.dtype | None = None, **_: object,
) -> Tensor:  # fmt: skip
    given = [value.detach() for value in (mean, std) if isinstance(value, Tensor)]
    mean, std = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))
    shape = list(torch.broadcast_shapes(*(value.shape for value in given))) if given else _shape((size,))
    dtype = given[0].dtype if given else dtype or torch.get_default_dtype()
    return distributions.normal(Draws.of(seed_step, call, shape), mean, std, dtype)


def _raised_randint(*args: Any, seed_step: Tensor, call: int, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """randint(high, size), randint(low, high, size)."""
    names = ("low", "high", "size")[-(len(args) + sum(name in kwargs for name in ("low", "high", "size"))) :]
    given = {**dict(zip([name for name in names if name not in kwargs], args, strict=True)), **kwargs}
    draws = Draws.of(seed_step, call, _shape((given["size"],)))
    return distributions.integers(draws, int(given.get("low", 0)), int(given["high"]), dtype or torch.int64)


def _raised_randint_like(
    input: Tensor, *bounds: int, seed_step: Tensor, call: int, low: int = 0, high: int | None = None,
    dtype: torch.dtype | None = None, **_: object,
) -> Tensor:  # fmt: skip
    if bounds:
        low, high = (low, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    assert high is not None
    return distributions.integers(Draws.of(seed_step, call, input.shape), low, high, dtype or input.dtype)


def _raised_randperm(n: int, *, seed_step: Tensor, call: int, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return distributions.permutation(Draws.of(seed_step, call, [n]), dtype or torch.int64)


def _raised_multinomial(input: Tensor, num_samples: int, replacement: bool = False, *, seed_step: Tensor, call: int, **_: object) -> Tensor:
    draws = Draws.of(seed_step, call, distributions.multinomial_shape(list(input.shape), num_samples, replacement))
    return distributions.multinomial(draws, input, num_samples, replacement)


def _raised_rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: object = False, *,
    seed_step: Tensor, call: int, **_: object,
) -> Tensor:  # fmt: skip
    """torch.rrelu has a generator where torch.nn.functional has `inplace`."""
    out = input * distributions.rrelu_slopes(Draws.of(seed_step, call, input.shape), input, lower, upper)
    return input.copy_(out) if inplace is True else out


def _raised_gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1, *, seed_step: Tensor, call: int
) -> Tensor:
    """As in torch.nn.functional; `eps` has no meaning there either."""
    noise = -distributions.exponential(Draws.of(seed_step, call, logits.shape), 1.0, logits.dtype).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter(dim, index, 1.0) - soft.detach() + soft


def _filled(values: Callable[..., Tensor], **defaults: float) -> Callable[..., Tensor]:
    """A method that overwrites its tensor with draws; `defaults` are its numbers, in order."""

    def raised(input: Tensor, *numbers: object, seed_step: Tensor, call: int, generator: object = None, **named: object) -> Tensor:
        given = {**defaults, **dict(zip(defaults, numbers, strict=False)), **named}
        return input.copy_(values(Draws.of(seed_step, call, input.shape), *given.values(), input.dtype))

    return raised


def _raised_bernoulli_(input: Tensor, p: Tensor | float = 0.5, *, seed_step: Tensor, call: int, **_: object) -> Tensor:
    if isinstance(p, Tensor):
        return input.copy_(bernoulli(seed_step, call, p.detach().expand(input.shape)))
    return input.copy_(keep_mask(seed_step, call, 1.0 - p, input.shape))


RAISED: dict[Target, Function] = {
    torch.rand: _raised_rand,
    torch.randn: _raised_randn,
    torch.rand_like: _raised_rand_like,
    torch.randn_like: _raised_randn_like,
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
    "uniform_": _filled(distributions.uniform, **{"from": 0.0, "to": 1.0}),
    "normal_": _filled(distributions.normal, mean=0.0, std=1.0),
    "exponential_": _filled(distributions.exponential, lambd=1.0),
    "log_normal_": _filled(distributions.log_normal, mean=1.0, std=2.0),
    "cauchy_": _filled(distributions.cauchy, median=0.0, sigma=1.0),
    "geometric_": _filled(distributions.geometric, p=0.5),
}
"""Torch function, or a method's name -> the same with `seed_step` and `call`."""
