"""Operators for routed experts in groups: dispatch of tokens to each group, products with its matrices, and combine.

    group_choices(choice [t, k], groups, each, most) -> own [q, t, m], slot [q, t, m]     which experts of a group a token has chosen
    to_groups(x [t, h], own) -> [q, t, m, h]                                              a token's row for each of these; else zeros
    weights_of_groups(weights [t, k], own, slot) -> [q, t, m]                             the weights of these experts; else zeros
    group_mm(rows [q, r, k], matrices [g, k, n], choice [q, r], each) -> [q, r, n]        each row times its matrix in the group
    from_groups(rows [q, t, m, h], own) -> [t, h]                                         the sum over the results of a token's experts

Group i of q has the experts from i * each to (i + 1) * each, as far as there are so many. `own` is an expert's number in its group, -1
where the token has no further expert there; such a row is neither read nor counted. Where an axis splits the experts, a group is the
experts of one rank: of `x` it needs only the tokens that chose one of them.

`to_groups` and `from_groups` are each other's gradient; so are both directions of the weights, and the products of `routed_mm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import operator, ops
from meshc.ops.grouped_mm import differentiate_products
from meshc.ops.routed_mm import mm_of_choices, outer_of_choices


@operator(
    "group_choices", "choice [groups, t, most], choice:int64 [groups, t, most]", "choice:integer [t, k], groups >= 0, each >= 1",
    rule="integers [t, k] choose among {groups} groups, 0 or more, of {each}, 1 or more, {most} of k at most",
    where=lambda most, k: 0 <= most <= k,
)  # fmt: skip
def group_choices(choice: Tensor, groups: int, each: int, most: int, first: int) -> tuple[Tensor, Tensor]:
    """Experts chosen by each token in `groups` groups of `each` experts, from group `first` on: `most` at most, in the token's order.

    A token may not choose more than `most` of a group: RuntimeError.
    """
    number = torch.arange(groups, device=choice.device, dtype=choice.dtype).view(-1, 1, 1) + first
    mine = choice.div(each, rounding_mode="floor").unsqueeze(0) == number
    if most < choice.shape[1]:
        torch._assert_async((mine.sum(2) <= most).all(), f"a token has chosen an expert twice: more than {most} of a group of {each}")
    slot = torch.sort(mine, dim=2, descending=True, stable=True).indices[:, :, :most]
    there = mine.gather(2, slot)
    own = choice.unsqueeze(0).expand(groups, -1, -1).gather(2, slot) - number * each
    return torch.where(there, own, -1), torch.where(there, slot, 0)


@operator(
    "to_groups", "x [q, t, m, h]", "x [t, h], own:integer [q, t, m]", rule="rows [t, h] have choices [q, t, m]",
    gradient=lambda grad, own: ops.from_groups(grad, own),
)  # fmt: skip
def to_groups(x: Tensor, own: Tensor) -> Tensor:
    return torch.where((own >= 0).unsqueeze(3), x.view(1, x.shape[0], 1, x.shape[1]), 0.0)


@operator("in_slots", "x [q, t, m, h]", "x [q, t, h], own:integer [q, t, m]", rule="rows [q, t, h] have choices [q, t, m]")
def in_slots(x: Tensor, own: Tensor) -> Tensor:
    """`to_groups` for tokens that each group already has: [q, t, h] -> [q, t, m, h]."""
    return torch.where((own >= 0).unsqueeze(3), x.unsqueeze(2), 0.0)


@operator("over_slots", "rows [q, t, h]", "rows [q, t, m, h], own:integer [q, t, m]", rule="rows [q, t, m, h] have choices [q, t, m]")
def over_slots(rows: Tensor, own: Tensor) -> Tensor:
    """`from_groups` without the sum over groups: [q, t, m, h] -> [q, t, h]."""
    return torch.where((own >= 0).unsqueeze(3), rows, 0.0).sum(2)


@operator(
    "from_groups", "rows [t, h]", "rows [q, t, m, h], own:integer [q, t, m]", rule="rows [q, t, m, h] have choices [q, t, m]",
    gradient=lambda grad, own: ops.to_groups(grad, own),
)  # fmt: skip
def from_groups(rows: Tensor, own: Tensor) -> Tensor:
    return torch.where((own >= 0).unsqueeze(3), rows, 0.0).sum((0, 2))


@operator(
    "weights_of_groups", "weights [q, t, m]", "weights [t, k], own:integer [q, t, m], slot:int64 [q, t, m]",
    rule="weights [t, k] have choices and slots [q, t, m]",
    gradient=lambda grad, shape, own, slot: ops.weights_to_tokens(grad, own, slot, shape[1]),
)  # fmt: skip
def weights_of_groups(weights: Tensor, own: Tensor, slot: Tensor) -> Tensor:
    found = weights.unsqueeze(0).expand(own.shape[0], -1, -1).gather(2, slot.clamp(0, weights.shape[1] - 1))
    return torch.where(own >= 0, found, 0.0)


@operator(
    "weights_to_tokens", "grad [t, chosen]", "grad [q, t, m], own:integer [q, t, m], slot:int64 [q, t, m], chosen >= 1",
    rule="weights, choices and slots are [q, t, m], slots of {chosen}, 1 or more",
    gradient=lambda grad, own, slot: ops.weights_of_groups(grad, own, slot),
)  # fmt: skip
def weights_to_tokens(grad: Tensor, own: Tensor, slot: Tensor, chosen: int) -> Tensor:
    """The transpose of `weights_of_groups`: [q, t, m] -> [t, chosen], summed over the groups."""
    made = grad.new_zeros(own.shape[0], own.shape[1], chosen)
    return made.scatter_add_(2, slot.clamp(0, max(chosen - 1, 0)), torch.where(own >= 0, grad, 0.0)).sum(0)


@operator(
    "group_mm", "rows [q, r, n]", "rows [q, r, k], matrices:rows [g, k, n], choice:integer [q, r], each >= 1",
    rule="rows [q, r, k] meet matrices [g, k, n] of their dtype, each the one of {each}, 1 or more, that integers [q, r] choose",
)  # fmt: skip
def group_mm(rows: Tensor, matrices: Tensor, choice: Tensor, each: int, filled: float) -> Tensor:
    """`filled` is the share of rows that have a matrix if tokens choose evenly; only the cost model uses it."""
    return mm_of_choices(rows.flatten(0, 1), matrices, _among_all(choice, each)).view(*rows.shape[:2], matrices.shape[2])


@operator(
    "group_outer", "left [count, k, n]", "left [q, r, k], right:left [q, r, n], choice:integer [q, r], each >= 1, count >= 0",
    rule="left [q, r, k] and right [q, r, n] are of one dtype, and integers [q, r] choose one of {each}, 1 or more, of {count}",
)  # fmt: skip
def group_outer(left: Tensor, right: Tensor, choice: Tensor, each: int, count: int, filled: float) -> Tensor:
    """For each of `count` matrices the sum over its rows of left (x) right: [q, r, k], [q, r, n] -> [count, k, n]."""
    return outer_of_choices(left.flatten(0, 1), right.flatten(0, 1), _among_all(choice, each), count)


differentiate_products(group_mm, group_outer)


def _among_all(choice: Tensor, each: int) -> Tensor:
    """Flat indices among the matrices of all groups, from indices in a group; -1 for none."""
    first = torch.arange(choice.shape[0], device=choice.device, dtype=choice.dtype).mul_(each).unsqueeze(1)
    return torch.where((choice >= 0) & (choice < each), choice + first, -1).flatten()
