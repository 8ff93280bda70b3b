"""Local shapes with dynamic sizes, inferred by running each operator on meta tensors of several sizes.

    worlds           n_batch 11, n_seq 37        n_batch 12, n_seq 39        n_batch 13, n_seq 40
    x of [n_batch, n_seq + 1, 64], reshaped to [.., 32, 2]
    gives dim 1      38                          40                          41                           so it is n_seq + 1

A result's size is searched among the operands' sizes, their sums, products and quotients, and sizes of windows of them. That an operator
accepts its operands in all worlds also checks that the program fits other sizes than those it was compiled with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch.fx import Node

from meshc.errors import CompileError
from meshc.ir import spmd
from meshc.ir.functions import Function, Keywords
from meshc.ir.nodes import comparison_key, leaves, op_name
from meshc.ir.sizes import Dynamic, Size, at, worlds


class OpenShapes:
    """`worlds[k]` substitutes the sizes of world k in a number, or in all numbers of a shape; without open sizes there is one world."""

    def __init__(self, sizes: Sequence[Dynamic]) -> None:
        self.sizes = worlds(sizes)
        self.worlds: list[Callable[[Any], Any]] = [partial(_substitute, world) for world in self.sizes] if sizes else [lambda value: value]

        self._made: dict[object, Any] = {}
        """Results of operators on meta tensors, memoised by their arguments: equal layers call the same."""

    def results(
        self, target: Function, args: Sequence[Any], kwargs: Keywords, meta: Mapping[Node, Sequence[Any]], axes: Mapping[str, int]
    ) -> tuple[Any, ...]:
        """What a call gives in each world; `meta`: what its operands are in each, `axes`: the sizes of the mesh's."""
        return tuple(self._result(target, args, kwargs, meta, axes, world) for world in range(len(self.worlds)))

    def _result(
        self, target: Function, args: Sequence[Any], kwargs: Keywords, meta: Mapping[Node, Sequence[Any]], axes: Mapping[str, int],
        world: int,
    ) -> Any:  # fmt: skip
        at = self.worlds[world]

        def value(argument: Any) -> Any:
            if isinstance(argument, Node):
                return meta[argument][world]
            return type(argument)(map(value, argument)) if isinstance(argument, list | tuple) else at(argument)

        given, named = [value(item) for item in args], {name: value(item) for name, item in kwargs.items()}
        if spmd.is_collective(target) or target is spmd.shard:
            return given[0].new_empty(spmd.collective_shape(target, given[0].shape, given[1:], axes))
        if target in spmd.INTEGERS.values():
            return 0
        if target in (spmd.mask, spmd.keep_first):
            return given[0]
        if "device" in named:
            named["device"] = "meta"
            named.pop("pin_memory", None)
        key = target, _memo_key(given), _memo_key(named)
        if key not in self._made:
            self._made[key] = target(*given, **named)
        return self._made[key]

    def shape(self, results: Sequence[object], near: Sequence[tuple[int, ...]], arguments: object, node: Node) -> tuple[int, ...]:
        """The shape of a result that is `results[k]` in world k. Raises CompileError for a size that is no expression of known sizes."""
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        return tuple(
            extents[0] if len(set(extents)) == 1 else self._size(extents, near, arguments, dim, node)
            for dim, extents in enumerate(zip(*(tensor.shape for tensor in tensors), strict=True))
        )

    def _size(self, extents: tuple[int, ...], near: Sequence[tuple[int, ...]], arguments: object, dim: int, node: Node) -> int:
        for candidate in _candidates(near, [leaf for leaf in leaves(arguments) if isinstance(leaf, Size)], dim):
            if not isinstance(candidate, Size):
                continue
            values = tuple(world(candidate) for world in self.worlds)
            if values == extents:
                return candidate
            steps = {extent - value for extent, value in zip(extents, values, strict=True)}
            if len(steps) == 1:
                return candidate + steps.pop()
            for whole, part in ((extents, values), (values, extents)):
                factors = {divmod(a, b) for a, b in zip(whole, part, strict=True) if b}
                if len(factors) == 1 and (factor := factors.pop())[1] == 0 and factor[0]:
                    return candidate * factor[0] if whole is extents else candidate // factor[0]
        strides = sorted({leaf for leaf in leaves(arguments) if type(leaf) is int and 1 < leaf <= 64})
        for candidate in _candidates(near, [], dim):
            for stride in strides:
                for shift in range(stride):
                    windows = (candidate + shift) // stride
                    steps = {extent - world(windows) for extent, world in zip(extents, self.worlds, strict=True)}
                    if isinstance(windows, Size) and len(steps) == 1:
                        return windows + steps.pop()
        raise CompileError(
            f"{op_name(node)} makes dim {dim} of sizes {list(extents)} for {self.sizes}: meshc finds no expression for it\n"
            "  what to do: leave the size out of Options(dynamic=...), or compute it outside the model"
        )


def _substitute(sizes: Mapping[str, int], value: object) -> object:
    return tuple(at(item, sizes) for item in value) if isinstance(value, tuple) else at(value, sizes)


def _candidates(near: Sequence[tuple[int, ...]], numbers: Sequence[int], dim: int) -> Iterator[int]:
    """Candidate sizes of a result: those of the arguments and operands, sums along one dim, products, differences, quotients."""
    own: Iterable[int] = (extent for shape in near for extent in shape if isinstance(extent, Size))
    single = list(dict.fromkeys([*numbers, *own]))
    yield from single
    for position in {dim, dim - 1}:
        along = [shape[position] for shape in near if 0 <= position < len(shape)]
        if len(along) > 1:
            yield sum(along)
    yield from (total for total in map(prod, near) if isinstance(total, Size))
    for a, b in combinations(single, 2):
        yield from (a * b, a + b, a - b, b - a)
    yield from (a // b for a in single for b in single if a != b)


def _memo_key(argument: object) -> object:
    """A hashable key of an argument: for a tensor, all that a result on meta tensors depends on."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.storage_offset()
    if isinstance(argument, list | tuple):
        return tuple(map(_memo_key, argument))
    return tuple((name, _memo_key(one)) for name, one in argument.items()) if isinstance(argument, dict) else comparison_key(argument)
