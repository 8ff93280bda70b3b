"""Preconditions of kernels that do not check their operands: conditions on operands by name, each None or the words that say what is wrong.

    like("indices", "grad_output")                          the one has the other's shape
    within("indices", 0, elements("self", 2))               integers from 0 up to, not including, the size of self's last two dims
    gives(aten.max_pool2d_with_indices.default, "grad_output", "self", "kernel_size", ...)
                                                            an operator makes of the operands a value of the gradient's shape

Conditions on shapes hold on meta tensors as well, and are asked before anything runs; conditions on values are for real ones. A condition
that cannot be asked of such operands raises, and does not hold (`meshc/check/guards.py`).

Which kernels need them was found by calling every operator that a program may name with operands of every kind between pages that cannot be
read (`tests/attack`). An operator without preconditions looks at shapes and values itself, or walks its operands by their own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshc.private import OpOverload

Operands: TypeAlias = Mapping[str, Any]
Precondition: TypeAlias = Callable[[Operands], str | None]
Number: TypeAlias = int | Callable[[Operands], int]


def holds(words: str, test: Callable[[Operands], bool]) -> Precondition:
    """A condition on shapes in words of its own."""
    return lambda o: None if test(o) else words


def like(name: str, other: str) -> Precondition:
    return holds(f"{name} has the shape of {other}", lambda o: o[name] is None or o[name].shape == o[other].shape)


def leading(name: str, other: str, space: int) -> Precondition:
    """Both have the same dims before the last `space`."""
    words = f"{name} and {other} have the same dims but for the last {space}"
    return holds(words, lambda o: o[name].dim() == o[other].dim() > space and o[name].shape[:-space] == o[other].shape[:-space])


def same_dtype(*names: str) -> Precondition:
    return holds(f"{', '.join(names)} have one dtype", lambda o: len({o[name].dtype for name in names if o[name] is not None}) <= 1)


def gives(forward: OpOverload, name: str, *operands: str) -> Precondition:
    def shape(o: Operands) -> torch.Size:
        given = [o[operand].to("meta") if isinstance(o[operand], Tensor) else o[operand] for operand in operands]
        found: Tensor | Sequence[Tensor] = forward(*given)
        return (found if isinstance(found, Tensor) else found[0]).shape

    return holds(f"{name} has the shape that {forward} makes of {', '.join(operands)}", lambda o: o[name].shape == shape(o))


def elements(name: str, space: int) -> Callable[[Operands], int]:
    return lambda o: prod(o[name].shape[-space:])


def size(name: str, dim: int) -> Callable[[Operands], int]:
    return lambda o: int(o[name].shape[dim])


def operand(name: str) -> Callable[[Operands], int]:
    return lambda o: int(o[name])


def within(name: str, low: Number, below: Number) -> Precondition:
    """Numbers of a tensor, or of a list, are from `low` up to, not including, `below`; NaN is not."""

    def condition(o: Operands) -> str | None:
        given = o[name]
        if given is None or isinstance(given, Tensor) and (given.is_meta or given.numel() == 0):
            return None
        least, past = (limit if isinstance(limit, int) else limit(o) for limit in (low, below))
        values = given if isinstance(given, Tensor) else torch.tensor(given)
        if values.numel() == 0:
            return None
        smallest, largest = (value.item() for value in torch.aminmax(values))
        if smallest >= least and largest < past:
            return None
        wrong = largest if smallest >= least else smallest
        return f"{name} holds {wrong}, where {least} to {past - 1} are possible"

    return condition


def finite(name: str) -> Precondition:
    """A tensor holds neither NaN nor infinity."""
    return lambda o: None if o[name].is_meta or bool(o[name].isfinite().all()) else f"{name} holds NaN or infinity"


def ascending(name: str, end: Number, exactly: bool = False) -> Precondition:
    """Offsets along the last dim: none falls, the first is 0 or more, the last is `end` at most, or `exactly`."""

    def condition(o: Operands) -> str | None:
        given = o[name]
        if given is None or given.is_meta or given.numel() == 0:
            return None
        last = end if isinstance(end, int) else end(o)
        smallest, largest = (value.item() for value in torch.aminmax(given))
        falls = bool((given.diff(dim=-1) < 0).any())
        off = exactly and (bool((given[..., 0] != 0).any()) or bool((given[..., -1] != last).any()))
        if smallest < 0 or largest > last or falls or off:
            return f"{name} are offsets that do not rise from 0 to {last}"
        return None

    return condition


def adds_up(name: str, total: Number) -> Precondition:
    """Lengths along the last dim, none below 0."""

    def condition(o: Operands) -> str | None:
        given = o[name]
        if given is None or given.is_meta:
            return None
        whole = total if isinstance(total, int) else total(o)
        fits = given.numel() == 0 or (0 <= int(given.min()) and int(given.max()) <= whole and bool((given.sum(-1) == whole).all()))
        return None if fits else f"{name} are lengths that do not add up to {whole}"

    return condition


def divides(left: str, right: str) -> Precondition:
    """Integer division of the least number by -1 has no result, and the processor ends the process over it."""

    def condition(o: Operands) -> str | None:
        a, b = (value if isinstance(value, Tensor) else torch.tensor(value) for value in (o[left], o[right]))
        if a.is_meta or b.is_meta or torch.promote_types(a.dtype, b.dtype).is_floating_point or a.numel() == 0 or b.numel() == 0:
            return None
        if a.dtype == torch.bool or b.dtype == torch.bool:
            return None
        least = torch.iinfo(torch.promote_types(a.dtype, b.dtype)).min
        if least < 0 and bool((b == -1).any()) and bool((a == least).any()):
            return f"{left} holds {least}, which -1 in {right} does not divide"
        return None

    return condition
