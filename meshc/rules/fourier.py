"""Sharding rules of Fourier transforms and `unfold`: the transformed dim is whole; being linear, they accept partial sums."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Operator, declarations
from meshc.rules.preconditions import Operands, holds
from meshc.rules.rule import ALONE, ONE, Dims, Rule, dims_of, shape_of, with_local_shape

aten = torch.ops.aten


def _transform(node: Node, tensors: list[Node]) -> Rule:
    """_fft_c2c, _fft_r2c, _fft_c2r: the result may have another size along a transformed dim."""
    source, target = shape_of(tensors[0]), shape_of(node)
    inside, out = dims_of("d", source), list(dims_of("d", target))
    dims = [d % len(source) for d in named_arguments(node)["dim"]]
    for dim in dims:
        if source[dim] != target[dim] and target[dim] != 1:
            out[dim] = f"o{dim}"
    whole = {letters[dim] for dim in dims for letters in (inside, out)}
    return Rule((inside,), (tuple(out),), whole=whole, linear=ALONE, defers=True)


def _unfold(node: Node, tensors: list[Node]) -> Rule:
    """(..., n, ...) -> (..., windows, ..., size)."""
    inside, out, whole = _windows(named_arguments(node)["dimension"], shape_of(tensors[0]), shape_of(node))
    return Rule((inside,), (out,), whole=whole, kind="layout")


def _unfold_backward(node: Node, tensors: list[Node]) -> Rule:
    """Overlapping windows are added up, so unlike `unfold` this is no layout operator."""
    out, inside, whole = _windows(named_arguments(node)["dim"], shape_of(node), shape_of(tensors[0]))
    return Rule((inside,), (out,), whole=whole, linear=ALONE, defers=True, lower=with_local_shape("input_sizes"))


def _windows(dim: int, long: tuple[int, ...], cut: tuple[int, ...]) -> tuple[Dims, Dims, set[str]]:
    """(letters of what is cut, of its windows, those that must be whole)."""
    if not long:
        return (), dims_of("d", cut), {*dims_of("d", cut)}
    letters = list(dims_of("d", long))
    dim %= len(long)
    parts = [*letters[:dim], ONE if cut[dim] == 1 else "w", *letters[dim + 1 :], ONE if cut[-1] == 1 else "s"]
    letters[dim] = ONE if long[dim] == 1 else "n"
    return tuple(letters), tuple(parts), {"n", "w", "s"}


_DIMS_FIT = holds("the dims are others each, counted from 0", lambda o: len({*o["dim"]} & {*range(o["self"].dim())}) == len(o["dim"]))


def _is_half(o: Operands) -> bool:
    return bool(o["self"].shape[o["dim"][-1]] == o["last_dim_size"] // 2 + 1)


OPERATORS = declarations({
    "_fft_c2c _fft_r2c": Operator(_transform, preconditions=(_DIMS_FIT,)),
    "_fft_c2r": Operator(
        _transform, preconditions=(_DIMS_FIT, holds("the last of the dims is half of last_dim_size, and one", _is_half))
    ),
    "unfold": Operator(_unfold),
    "unfold_copy": Operator(_unfold, linear=ALONE, monotone=rises_in_first),
    "unfold_backward": Operator(_unfold_backward),
})
