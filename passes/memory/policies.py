"""Recompute policies by name: the values that backward may recompute.

    none       nothing
    cheap      operators that take little time beside products: pointwise ones, casts, norms, views, dropout, masks
    selective  all but matrix products, convolutions and attention; collectives too
    layer      all values that only their own layer reads (Chen et al., arXiv:1604.06174)
    sqrt       the same for groups of layers, about as many in each as there are groups (likewise); over a pipeline, which is cut into
               stages of few layers later, this is `layer`

Values are recomputed from values that are kept. A value of parameters alone is never kept: a gathered parameter is gathered again, as
without any policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final

import torch
from torch.fx import Node

from meshc.cost.flops import flops
from meshc.ir import phase_of, records, spmd
from meshc.plan.memory_lines import RematLine
from meshc.program.packing import is_view
from meshc.rules.elementwise import is_pointwise
from meshc.rules.families import operator_of

LITTLE: Final = "little"
"""Internal policy: `cheap`, and all-to-alls, which return as many bytes as they read (`recompute.py`)."""

BY_BUDGET: Final = "by budget"
"""Internal policy: as much as a budget requires of what `layer` recomputes inside of layers, and `cheap` outside
(`recompute_within_budget.py`)."""

_MEMBER = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class RecomputePolicy:
    """
    may    whether a value may be recomputed
    ahead  the most products of backward between a value's recompute and its last reader; None: no limit
    """

    may: Callable[[Node], bool]
    ahead: Callable[[Node], int | None] = lambda node: None


AHEAD: Final = 8
"""Products of backward. A norm, a gate or a projection of several parts is read within so many; a sum that goes through all layers is not,
and is kept. By what layers are made of, not by measurement (docs/decisions/recompute.md)."""


def is_cheap(node: Node) -> bool:
    """Whether an operator takes little time beside a product: those of `Operator.cheap`, pointwise ones, views, and per-rank functions
    (masks, tiles, coordinates)."""
    if spmd.is_collective(node.target):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return is_view(node) or is_pointwise(node) or operator_of(node.target).cheap


def is_no_product(node: Node) -> bool:
    """Whether an operator is no product, convolution or attention."""
    return flops(node) == 0


def layer_of(node: Node) -> str:
    """The outermost member of a list of modules that contains the source of `node`: `model.layers.3`; "" outside of lists."""
    found = _MEMBER.match(records(node)[0].source.module)
    return found.group() if found else ""


def _may_within_groups(groups: Mapping[str, int]) -> Callable[[Node], bool]:
    """Whether only its own group of layers reads a value."""

    def may(node: Node) -> bool:
        group = groups.get(layer_of(node))
        return group is not None and all(groups.get(layer_of(user)) == group for user in node.users if phase_of(user) == "forward")

    return may


_NEAR: Final[Mapping[str, Callable[[Node], bool]]] = {
    "cheap": is_cheap,
    LITTLE: lambda node: is_cheap(node) or node.target is spmd.all_to_all,
    "selective": is_no_product,
}
"""What may be recomputed by the policies that look no further than `AHEAD`."""


def policy_of(name: str, forward: Iterable[Node], pipeline: bool) -> RecomputePolicy:
    """The policy `name` for a graph's forward calls."""
    if name == "none":
        return RecomputePolicy(lambda node: False)
    if name in _NEAR:
        return RecomputePolicy(_NEAR[name], lambda node: AHEAD)
    layers = [layer for layer in dict.fromkeys(map(layer_of, forward)) if layer]
    together = max(1, ceil(sqrt(len(layers)))) if name == "sqrt" and not pipeline else 1
    inside = _may_within_groups({layer: number // together for number, layer in enumerate(layers)})
    if name != BY_BUDGET:
        return RecomputePolicy(inside)
    return RecomputePolicy(
        lambda node: inside(node) if layer_of(node) else is_cheap(node), lambda node: None if layer_of(node) else AHEAD
    )


def _may_recompute_checkpointed(node: Node) -> bool:
    """Whether a value of the user's own checkpointed region is recomputed: not if its policy saves it, or if it is read outside."""
    source = records(node)[0].source
    return not source.saved and all(
        records(user)[0].source.region == source.region for user in node.users if phase_of(user) == "forward"
    )


CHECKPOINTED: Final = RecomputePolicy(_may_recompute_checkpointed)


class Policies:
    """Policy of each forward call: of the plan's last line about its module, else of the user's own checkpointed region
    (`torch.utils.checkpoint`), else `usual`."""

    def __init__(self, usual: str, lines: Sequence[RematLine], forward: Sequence[Node], pipeline: bool) -> None:
        self.usual, self.lines = usual, lines
        self._by_name = {name: policy_of(name, forward, pipeline) for name in {usual, *(line.policy for line in lines)}}
        self._of_module: dict[str, RecomputePolicy | None] = {}

    def of(self, node: Node) -> RecomputePolicy:
        source = records(node)[0].source
        if source.module not in self._of_module:
            name = next((line.policy for line in reversed(self.lines) if line.covers(source.module)), None)
            self._of_module[source.module] = None if name is None else self._by_name[name]
        return self._of_module[source.module] or (CHECKPOINTED if source.region else self._by_name[self.usual])
