"""ATen calls of a torch-level call, recorded at the level of torch's autocast, with the casts of their operands.

A `TorchDispatchMode` below autograd sees the same operators as autocast's dispatch key above it, if it decomposes, by torch's own kernels,
each composite that is not on the device's list. A listed operator is not decomposed, as in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from meshc.frontend.autocast_policy import DISPATCH_KEYS, INSIDE, POLICIES, Policy, Region, eligible, operand_dtype
from meshc.ir import trees
from meshc.ir.functions import Function, Keywords
from meshc.private import OpOverload, TorchDispatchMode

WHOLE: dict[str, Function] = {
    "aten::dropout": torch.dropout,
    "aten::feature_dropout": torch.feature_dropout,
    "aten::alpha_dropout": torch.alpha_dropout,
    "aten::feature_alpha_dropout": torch.feature_alpha_dropout,
    "aten::scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
}
"""Composites that are not decomposed, because later passes know them by these names."""


@dataclass
class AtenCall:
    """One ATen call with its fake operands (after their casts) and results."""

    function: OpOverload
    args: Sequence[object]
    kwargs: Keywords
    out: object


@dataclass
class Casts:
    """The casts of a graph so far, by ids of fake tensors, which `alive` keeps alive."""

    source: dict[int, Tensor] = field(default_factory=dict)
    node: dict[int, Node] = field(default_factory=dict)
    of_leaf: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)

    def make(self, tensor: Tensor, dtype: torch.dtype, region: Region) -> Tensor:
        """torch's `cached_cast`: float32 leaves that require a gradient share one cast to the region's dtype."""
        leaf = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        shared = leaf and region.cache and dtype == region.dtype
        if shared and (id(tensor), dtype) in self.of_leaf:
            return self.of_leaf[id(tensor), dtype]
        cast = tensor.to(dtype)
        self.source[id(cast)] = tensor
        self.alive += [tensor, cast]
        if shared:
            self.of_leaf[id(tensor), dtype] = cast
        return cast


class AtenCallRecorder(TorchDispatchMode):
    """Records the ATen calls of a torch-level call; with a region, casts their operands as torch would."""

    def __init__(self, device: str, region: Region | None, casts: Casts) -> None:
        super().__init__()
        self.device, self.region, self.casts = device, region, casts
        self.calls: list[AtenCall] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Sequence[object] = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs, name = kwargs or {}, function.name()
        if function.namespace == "prim":  # a query (`prim::device`), no call
            return function(*args, **kwargs)
        policy = _policy(self.device, name)
        if policy is None and name not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if self.region is not None and policy is not None:
            args, kwargs = self._cast(name, policy, self.region, args, kwargs)
        elif self.region is not None and name in INSIDE[self.device]:
            before = len(self.made)
            self._cast(name, INSIDE[self.device][name], self.region, args, kwargs)
            if len(self.made) > before:
                raise AutocastRefused(f"torch casts inside the kernel of {name}, where autograd does not see it")
        out = function(*args, **kwargs)
        self.calls.append(AtenCall(function, args, kwargs, out))
        return out

    def _cast(
        self, name: str, policy: Policy, region: Region, args: Sequence[object], kwargs: Keywords
    ) -> tuple[Sequence[object], Keywords]:
        leaves = trees.leaves((args, kwargs))
        dtypes = [leaf.dtype for leaf in tensors(leaves) if eligible(leaf.dtype)]
        try:
            dtype = operand_dtype(policy, region, dtypes, any(isinstance(leaf, torch.dtype) for leaf in leaves))
        except ValueError as error:
            raise AutocastRefused(f"{name}: {error}") from None

        def cast(leaf: object) -> object:
            if dtype is None or not isinstance(leaf, Tensor) or leaf.dtype == dtype or not eligible(leaf.dtype):
                return leaf
            self.made.append(self.casts.make(leaf, dtype, region))
            return self.made[-1]

        casted: tuple[Sequence[object], Keywords] = trees.map_leaves(cast, (args, kwargs))
        return casted


class AutocastRefused(Exception):
    """Why a call of a region cannot be lowered."""


@functools.cache
def _policy(device: str, name: str) -> Policy | None:
    policy = POLICIES[device].get(name)
    if policy is None and torch._C._dispatch_has_kernel_for_dispatch_key(name, DISPATCH_KEYS[device]):
        raise AutocastRefused(f"{name} has an autocast rule for {device} that meshc does not know")
    return policy


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in trees.leaves(tree) if isinstance(leaf, Tensor)]


def trace(watch: AtenCallRecorder, operands: list[Tensor], names: list[int], result: object) -> list[object]:
    """The ATen calls of a call, with a name and a dtype in place of each tensor; a cast operand keeps its operand's name."""
    name_of: dict[int, object] = dict(zip(map(id, operands), names, strict=True))

    def name(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        source = leaf if id(leaf) in name_of else watch.casts.source.get(id(leaf), leaf)
        if id(source) not in name_of:
            raise AutocastRefused("it uses a tensor that is no operand")
        return name_of[id(source)], leaf.dtype

    rows: list[object] = []
    for number, call in enumerate(watch.calls):
        rows.append((call.function.name(), [*map(name, trees.leaves((call.args, call.kwargs)))]))
        name_of |= {id(leaf): (number, position) for position, leaf in enumerate(tensors(call.out))}
    return [*rows, [*map(name, trees.leaves(result))]]
