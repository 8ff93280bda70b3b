"""Sharding rules of Fourier transforms and `unfold`: the transformed dim is whole; being linear, they accept partial sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Operator, declarations
from meshc.rules.preconditions import Operands, holds
from meshc.rules.rule import ALONE, ONE, Rule, integer, integers, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten


def _letters(shape: tuple[int, ...]) -> list[str]:
    return [ONE if size == 1 else f"d{i}" for i, size in enumerate(shape)]


def _transform(node: Node, tensors: list[Node]) -> Rule:
    """_fft_c2c, _fft_r2c, _fft_c2r: the result may have another size along a transformed dim."""
    source, target = shape_of(tensors[0]), result_shapes(node)[0]
    inside, out = _letters(source), _letters(target)
    whole = set()
    for dim in (d % len(source) for d in integers(node.args[1])):
        if source[dim] != target[dim] and target[dim] != 1:
            out[dim] = f"o{dim}"
        whole |= {inside[dim], out[dim]}
    return Rule((tuple(inside),), (tuple(out),), ({},), frozenset(whole - {ONE}), linear=ALONE, defers=True)


def _unfold(node: Node, tensors: list[Node]) -> Rule:
    """(..., n, ...) -> (..., windows, ..., size)."""
    source, target = shape_of(tensors[0]), result_shapes(node)[0]
    if not source:
        return Rule(((),), (tuple(_letters(target)),), ({},), frozenset(_letters(target)) - {ONE}, kind="layout")
    inside, out = _windows(integer(node.args[1]), source, target)
    return Rule((inside,), (out,), ({},), _whole_letters(inside, out), kind="layout")


def _unfold_backward(node: Node, tensors: list[Node]) -> Rule:
    """Overlapping windows are added up, so unlike `unfold` this is no layout operator."""
    source, target = shape_of(tensors[0]), result_shapes(node)[0]
    if not target:
        return Rule((tuple(_letters(source)),), ((),), ({},), frozenset(_letters(source)) - {ONE}, linear=ALONE, defers=True)
    out, inside = _windows(integer(node.args[2]), target, source)
    return Rule((inside,), (out,), ({},), _whole_letters(inside, out), linear=ALONE, defers=True, lower=_lower_unfold_backward)


def _windows(dim: int, long: tuple[int, ...], cut: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    letters = _letters(long)
    dim %= len(long)
    parts = [*letters[:dim], ONE if cut[dim] == 1 else "w", *letters[dim + 1 :], ONE if cut[-1] == 1 else "s"]
    letters[dim] = ONE if long[dim] == 1 else "n"
    return tuple(letters), tuple(parts)


def _whole_letters(inside: tuple[str, ...], out: tuple[str, ...]) -> frozenset[str]:
    return frozenset({"n", "w", "s"} & {*inside, *out})


def _lower_unfold_backward(local: Local) -> Node:
    return local.emit(local.node.target, local.operands[0], list(local.out_shape(0)), *local.node.args[2:])


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
