"""A model of a library as a row of data: how it is built, and the inputs of its step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models import Case
from tests.zoo.trying import NotBuilt

MOST: Final = 40_000_000
"""Parameters of a model that is small enough."""

Make = Callable[[], Any]


@dataclass(frozen=True)
class Part:
    """An object of a library, by the path of its class or function and what this is called with; `Part(path)()` makes it."""

    path: str
    config: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        args = [value() if isinstance(value, Part) else value for value in self.args]
        return found_at(self.path)(*args, **{name: value() if isinstance(value, Part) else value for name, value in self.config.items()})


def part(path: str, *args: Any, **config: Any) -> Part:
    return Part(path, config, args)


@dataclass(frozen=True)
class Row:
    """What the makers of `inputs` make goes to the model by name; the loss, another part or `total`, gets the output and what those of
    `target` make."""

    library: str
    name: str
    model: Part
    inputs: Mapping[str, Make]
    loss: Part | None = None
    target: Mapping[str, Make] = field(default_factory=dict)

    def case(self) -> Case:
        """The model with the inputs of a training step. Raises NotBuilt."""
        torch.manual_seed(1)
        try:
            model = self.model().float().train()
            count = sum(parameter.numel() for parameter in model.parameters())
            if count > MOST:
                raise ValueError(f"it has {count:,} parameters")
            kwargs, target = ({name: make() for name, make in makers.items()} for makers in (self.inputs, self.target))
            case = Case(self.name, model, kwargs, self.loss() if self.loss else total, target)
            loss = case.loss_of(model(**kwargs))
            if not torch.isfinite(loss):
                raise ValueError(f"its loss is {loss.item()}")
        except Exception as error:
            raise NotBuilt(f"{type(error).__name__}: {error}") from error
        return case


def found_at(path: str) -> Any:
    """What a dotted path leads to: modules as far as they go, then attributes."""
    module, rest = path, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not (module + ".").startswith(error.name + ".") or "." not in module:
                raise
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for name in rest:
        value = getattr(value, name)
    return value


def total(output: Any) -> Tensor:
    """A loss for whatever a model gives: the mean of silu over each floating tensor, which no normalisation makes constant; their sum."""
    return sum((F.silu(value).mean() for value in _floating(output)), torch.zeros(()))


def _floating(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _floating(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _floating(value)


def normal(*shape: int) -> Make:
    return lambda: torch.randn(shape)


def uniform(*shape: int) -> Make:
    return lambda: torch.rand(shape)


def ones(*shape: int) -> Make:
    """Of integers, as masks are."""
    return lambda: torch.ones(shape, dtype=torch.long)


def true(*shape: int) -> Make:
    return lambda: torch.ones(shape, dtype=torch.bool)


def below(high: int, *shape: int) -> Make:
    """Integers from 0."""
    return lambda: torch.randint(high, shape)


def exactly(values: Any) -> Make:
    """A tensor of these numbers."""
    return lambda: torch.tensor(values)


def same(value: Any) -> Make:
    """What is no tensor."""
    return lambda: value


def each(*makers: Make) -> Make:
    """A list."""
    return lambda: [make() for make in makers]


def by_name(**makers: Make) -> Make:
    """A dict."""
    return lambda: {name: make() for name, make in makers.items()}
