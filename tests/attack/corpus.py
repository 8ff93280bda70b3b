"""Calls of the operators that a program may name, as torch's own samples make them: what attacks start from.

The samples of torch's table of operators run forward and backward, and every call that arrives below autograd is kept: operands that fit,
of shapes that an operator is meant for. What no sample calls is missing here; `missing` says which those are.
"""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshc.text.allowed_operators import OPERATORS, resolve, spelling
from tests.conformance import torch_samples

MOST_ELEMENTS = 1 << 14
EACH = 8
"""Calls that are kept of an operator, at most."""


@dataclass(frozen=True)
class Call:
    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return spelling(self.target)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


class _Keep(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Call]] = defaultdict(list)

    def __torch_dispatch__(self, target: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = spelling(target)
        if name in OPERATORS and len(self.calls[name]) < EACH:
            made = Call(target, *pytree.tree_map(_kept, (tuple(args), dict(kwargs or {}))))
            if sum(tensor.numel() for tensor in made.tensors()) <= MOST_ELEMENTS:
                self.calls[name].append(made)
        return target(*args, **(kwargs or {}))


def _kept(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone() if leaf.layout == torch.strided else leaf.to_dense()


def recorded(names: Iterable[str] | None = None, samples: int = 3, seed: int = 0) -> dict[str, list[Call]]:
    """Calls by operator, of the entries of torch's table with these names, or of all."""
    keep, entries = _Keep(), torch_samples.entries()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in entries if names is None else names:
            _run(entries[name], keep, samples, seed)
    return {name: calls for name, calls in sorted(keep.calls.items()) if calls}


def _run(entry: Any, keep: _Keep, samples: int, seed: int) -> None:
    try:
        for call in torch_samples.calls(entry, samples, seed):
            with keep:
                made = call.function(*call.tensors)
                real = [value for value in made if value.requires_grad]
                if real:
                    wanted = [tensor for tensor in call.tensors if tensor.requires_grad]
                    torch.autograd.grad([value.sum() for value in real], wanted, allow_unused=True)
    except Exception:  # noqa: BLE001 - samples of torch's that do not run here are none of ours
        return


def missing(calls: dict[str, list[Call]]) -> list[str]:
    return sorted(OPERATORS - calls.keys())


def by_schema(names: Iterable[str], draw: random.Random) -> Iterator[Call]:
    """Calls whose operands only have the kinds that the schema asks for: most are refused, and none may do harm."""
    for name in names:
        target = resolve(name)
        if isinstance(target, OpOverload):
            given = [(argument, _of_kind(str(argument.type), draw)) for argument in target._schema.arguments]
            args = tuple(value for argument, value in given if not argument.kwarg_only)
            yield Call(target, args, {argument.name: value for argument, value in given if argument.kwarg_only})


def _of_kind(kind: str, draw: random.Random) -> Any:
    """A number now and then where a dtype is meant, since torch takes one there."""
    if kind.startswith("Optional["):
        return None if draw.random() < 0.6 else _of_kind(kind[9:-1], draw)
    if kind.startswith("List["):
        return [_of_kind(kind[5:-1], draw) for _ in range(draw.randint(0, 4))]
    shape = [draw.randint(1, 5) for _ in range(draw.choice([0, 1, 2, 2, 3, 4]))]
    values: dict[str, Any] = {
        "Tensor": torch.randn(shape) if draw.random() < 0.6 else torch.randint(0, 4, shape),
        "int": draw.randint(-2, 6),
        "float": draw.uniform(-1, 1),
        "bool": draw.random() < 0.5,
        "number": draw.randint(-2, 6),
        "str": draw.choice(["sum", "mean", "none", "floor", "linear"]),
        "Device": torch.device("cpu"),
    }
    return values.get(kind)
