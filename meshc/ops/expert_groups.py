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

from meshc.ops.definition import operator
from meshc.ops.operands import misfit
from meshc.ops.routed_mm import mm_of_choices, outer_of_choices

INTEGERS = (torch.int64, torch.int32)


def _empty_choices(choice: Tensor, groups: int, each: int, most: int, first: int) -> tuple[Tensor, Tensor]:
    shape = (groups, choice.shape[0], most)
    return choice.new_empty(shape), choice.new_empty(shape, dtype=torch.int64)


@operator("group_choices", results=_empty_choices, fit=lambda choice, groups, each, most, first: _fit_choices(choice, groups, each, most))
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


def _fit_choices(choice: Tensor, groups: int, each: int, most: int) -> None:
    if choice.dim() != 2 or choice.dtype not in INTEGERS or groups < 0 or each < 1 or not 0 <= most <= choice.shape[1]:
        rule = f"integers [t, k] choose among {groups} groups, 0 or more, of {each}, 1 or more, {most} of k at most"
        raise misfit("group_choices", rule, choice=choice)


def _fit_to(x: Tensor, own: Tensor) -> None:
    if x.dim() != 2 or own.dim() != 3 or own.dtype not in INTEGERS or own.shape[1] != x.shape[0]:
        raise misfit("to_groups", "rows [t, h] have choices [q, t, m]", x=x, own=own)


@operator("to_groups", results=lambda x, own: x.new_empty((*own.shape, x.shape[1])), fit=_fit_to)
def to_groups(x: Tensor, own: Tensor) -> Tensor:
    return torch.where((own >= 0).unsqueeze(3), x.view(1, x.shape[0], 1, x.shape[1]), 0.0)


def _fit_slots(x: Tensor, own: Tensor) -> None:
    if x.dim() != 3 or own.dim() != 3 or own.dtype not in INTEGERS or own.shape[:2] != x.shape[:2]:
        raise misfit("in_slots", "rows [q, t, h] have choices [q, t, m]", x=x, own=own)


@operator("in_slots", results=lambda x, own: x.new_empty((*own.shape, x.shape[2])), fit=_fit_slots)
def in_slots(x: Tensor, own: Tensor) -> Tensor:
    """`to_groups` for tokens that each group already has: [q, t, h] -> [q, t, m, h]."""
    return torch.where((own >= 0).unsqueeze(3), x.unsqueeze(2), 0.0)


def _fit_from(rows: Tensor, own: Tensor) -> None:
    if rows.dim() != 4 or rows.shape[:3] != own.shape or own.dtype not in INTEGERS:
        raise misfit("from_groups", "rows [q, t, m, h] have choices [q, t, m]", rows=rows, own=own)


@operator("over_slots", results=lambda rows, *_: rows.new_empty(*rows.shape[:2], rows.shape[3]), fit=_fit_from)
def over_slots(rows: Tensor, own: Tensor) -> Tensor:
    """`from_groups` without the sum over groups: [q, t, m, h] -> [q, t, h]."""
    return torch.where((own >= 0).unsqueeze(3), rows, 0.0).sum(2)


@operator("from_groups", results=lambda rows, *_: rows.new_empty(rows.shape[1], rows.shape[3]), fit=_fit_from)
def from_groups(rows: Tensor, own: Tensor) -> Tensor:
    return torch.where((own >= 0).unsqueeze(3), rows, 0.0).sum((0, 2))


def _fit_weights(weights: Tensor, own: Tensor, slot: Tensor) -> None:
    integers = own.dtype in INTEGERS and slot.dtype == torch.int64
    if weights.dim() != 2 or own.dim() != 3 or not integers or own.shape != slot.shape or own.shape[1] != weights.shape[0]:
        raise misfit("weights_of_groups", "weights [t, k] have choices and slots [q, t, m]", weights=weights, own=own, slot=slot)


@operator("weights_of_groups", results=lambda weights, own, *_: weights.new_empty(own.shape), fit=_fit_weights)
def weights_of_groups(weights: Tensor, own: Tensor, slot: Tensor) -> Tensor:
    found = weights.unsqueeze(0).expand(own.shape[0], -1, -1).gather(2, slot.clamp(0, weights.shape[1] - 1))
    return torch.where(own >= 0, found, 0.0)


def _fit_tokens(grad: Tensor, own: Tensor, slot: Tensor, chosen: int) -> None:
    if own.dim() != 3 or not grad.shape == own.shape == slot.shape or own.dtype not in INTEGERS or slot.dtype != torch.int64 or chosen < 1:
        rule = f"weights, choices and slots are [q, t, m], slots of {chosen}, 1 or more"
        raise misfit("weights_to_tokens", rule, grad=grad, own=own, slot=slot)


@operator("weights_to_tokens", results=lambda grad, own, slot, chosen: grad.new_empty(own.shape[1], chosen), fit=_fit_tokens)
def weights_to_tokens(grad: Tensor, own: Tensor, slot: Tensor, chosen: int) -> Tensor:
    """The transpose of `weights_of_groups`: [q, t, m] -> [t, chosen], summed over the groups."""
    made = grad.new_zeros(own.shape[0], own.shape[1], chosen)
    return made.scatter_add_(2, slot.clamp(0, max(chosen - 1, 0)), torch.where(own >= 0, grad, 0.0)).sum(0)


@operator(
    "group_mm",
    results=lambda rows, matrices, *_: rows.new_empty(*rows.shape[:2], matrices.shape[2]),
    fit=lambda rows, matrices, choice, each, *_: _fit_mm(rows, matrices, choice, each),
)
def group_mm(rows: Tensor, matrices: Tensor, choice: Tensor, each: int, filled: float) -> Tensor:
    """`filled` is the share of rows that have a matrix if tokens choose evenly; only the cost model uses it."""
    return mm_of_choices(rows.flatten(0, 1), matrices, _among_all(choice, each)).view(*rows.shape[:2], matrices.shape[2])


def _fit_mm(rows: Tensor, matrices: Tensor, choice: Tensor, each: int) -> None:
    meet = (rows.dim(), matrices.dim()) == (3, 3) and rows.shape[2] == matrices.shape[1] and rows.dtype == matrices.dtype
    if not meet or not _chooses(choice, rows) or each < 1:
        rule = f"rows [q, r, k] meet matrices [g, k, n] of their dtype, each the one of {each}, 1 or more, that integers [q, r] choose"
        raise misfit("group_mm", rule, rows=rows, matrices=matrices, choice=choice)


@operator(
    "group_outer",
    results=lambda left, right, choice, each, count, *_: left.new_empty(count, left.shape[2], right.shape[2]),
    fit=lambda left, right, choice, each, count, *_: _fit_outer(left, right, choice, each, count),
)
def group_outer(left: Tensor, right: Tensor, choice: Tensor, each: int, count: int, filled: float) -> Tensor:
    """For each of `count` matrices the sum over its rows of left (x) right: [q, r, k], [q, r, n] -> [count, k, n]."""
    return outer_of_choices(left.flatten(0, 1), right.flatten(0, 1), _among_all(choice, each), count)


def _fit_outer(left: Tensor, right: Tensor, choice: Tensor, each: int, count: int) -> None:
    pair = (left.dim(), right.dim()) == (3, 3) and left.shape[:2] == right.shape[:2] and left.dtype == right.dtype
    if not pair or not _chooses(choice, left) or each < 1 or count < 0:
        rule = f"left [q, r, k] and right [q, r, n] are of one dtype, and integers [q, r] choose one of {each}, 1 or more, of {count}"
        raise misfit("group_outer", rule, left=left, right=right, choice=choice)


def _chooses(choice: Tensor, rows: Tensor) -> bool:
    return choice.shape == rows.shape[:2] and choice.dtype in INTEGERS


def _among_all(choice: Tensor, each: int) -> Tensor:
    """Flat indices among the matrices of all groups, from indices in a group; -1 for none."""
    first = torch.arange(choice.shape[0], device=choice.device, dtype=choice.dtype).mul_(each).unsqueeze(1)
    return torch.where((choice >= 0) & (choice < each), choice + first, -1).flatten()


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    ctx.rest = inputs[len(tensors) :]
    ctx.save_for_backward(*tensors)


def _to_groups_backward(ctx, grad):  # type: ignore[no-untyped-def]
    _, own = ctx.saved_tensors
    return from_groups(grad, own), None


def _from_groups_backward(ctx, grad):  # type: ignore[no-untyped-def]
    _, own = ctx.saved_tensors
    return to_groups(grad, own), None


def _weights_backward(ctx, grad):  # type: ignore[no-untyped-def]
    weights, own, slot = ctx.saved_tensors
    return weights_to_tokens(grad, own, slot, weights.shape[1]), None, None


def _tokens_backward(ctx, grad):  # type: ignore[no-untyped-def]
    _, own, slot = ctx.saved_tensors
    return weights_of_groups(grad, own, slot), None, None, None


def _group_mm_backward(ctx, grad):  # type: ignore[no-untyped-def]
    (rows, matrices, choice), (each, filled) = ctx.saved_tensors, ctx.rest
    count = matrices.shape[0]  # the sum first: rows are not read any more then, while what comes of the other is as large
    of_matrices = group_outer(rows, grad, choice, each, count, filled) if ctx.needs_input_grad[1] else None
    of_rows = group_mm(grad, matrices.transpose(1, 2), choice, each, filled) if ctx.needs_input_grad[0] else None
    return of_rows, of_matrices, None, None, None


def _group_outer_backward(ctx, grad):  # type: ignore[no-untyped-def]
    (left, right, choice), (each, _, filled) = ctx.saved_tensors, ctx.rest
    of_left = group_mm(right, grad.transpose(1, 2), choice, each, filled) if ctx.needs_input_grad[0] else None
    of_right = group_mm(left, grad, choice, each, filled) if ctx.needs_input_grad[1] else None
    return of_left, of_right, None, None, None, None


to_groups.register_autograd(_to_groups_backward, setup_context=_save)
from_groups.register_autograd(_from_groups_backward, setup_context=_save)
weights_of_groups.register_autograd(_weights_backward, setup_context=_save)
weights_to_tokens.register_autograd(_tokens_backward, setup_context=_save)
group_mm.register_autograd(_group_mm_backward, setup_context=_save)
group_outer.register_autograd(_group_outer_backward, setup_context=_save)
