"""Operators for routed experts on used rows only: dispatch, products and combine of as many rows as a group has choices.

    used_rows(own [1, t, m], count) -> used [1, t * m], ends [count]              places with a choice, by expert; end of each expert's
    rows_of_tokens(x [t, h], used, chosen) -> [1, t * m, h]                       the token of each row
    rows_of_places(x [1, t * m, ..], used) -> [1, t * m, ..]                      the value in the place of each row
    used_mm(rows [1, t * m, k], matrices [count, k, n], ends) -> [1, t * m, n]    rows by the matrix of their expert
    used_outer(left [1, t * m, k], right [1, t * m, n], ends) -> [count, k, n]    for each expert the sum over its rows of left (x) right
    tokens_of_rows(rows [1, t * m, h], used, tokens, chosen) -> [t, h]            the sum over a token's rows
    places_of_rows(rows [1, t * m, ..], used, places) -> [1, t * m, ..]           each in its place; zeros in the others
    rows_spread(rows [1, t * m, ..], dim, size, start, step) -> [1, t * m, ..]    a slice of a dim behind the rows, and zeros beside it

A place is token * chosen + number, as in `own`, which `expert_groups.py` explains. The shapes above are bounds: of t * m rows there are
only as many as there are choices from 0 up to `count`, those of expert 0 first. Other rows are not computed, read or stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import operator
from meshc.ops.expert_groups import INTEGERS
from meshc.ops.grouped_mm import mm_of_runs, outer_of_runs
from meshc.ops.operands import misfit

EXACT = (torch.float32, torch.float64)
"""Dtypes in which sums are accumulated in order; shorter ones are widened first."""


def _fit_own(own: Tensor, count: int) -> None:
    if own.dim() != 3 or own.shape[0] != 1 or own.dtype not in INTEGERS or count < 1:
        raise misfit("used_rows", f"integers [1, t, m] choose among {count} experts, 1 or more", own=own)


@operator(
    "used_rows",
    results=lambda own, count: tuple(own.new_empty(shape, dtype=torch.int64) for shape in ((1, own.shape[1] * own.shape[2]), (count,))),
    fit=_fit_own,
)
def used_rows(own: Tensor, count: int) -> tuple[Tensor, Tensor]:
    choice = own.reshape(1, -1)
    ordered, order = torch.sort(torch.where((choice < 0) | (choice >= count), count, choice), dim=1, stable=True)
    ends = torch.searchsorted(ordered[0], torch.arange(count, dtype=ordered.dtype, device=own.device), right=True)
    return order[:, : int(ends[-1])].contiguous(), ends


def _fit_tokens(x: Tensor, used: Tensor, chosen: int) -> None:
    if x.dim() != 2 or not _are_places(used) or chosen < 1:
        raise misfit("rows_of_tokens", f"tokens [t, h] are in places [1, r] of {chosen} choices, 1 or more", x=x, used=used)


@operator("rows_of_tokens", results=lambda x, used, *_: x.new_empty((1, used.shape[1], x.shape[1])), fit=_fit_tokens)
def rows_of_tokens(x: Tensor, used: Tensor, chosen: int) -> Tensor:
    return x.index_select(0, used[0].div(chosen, rounding_mode="floor")).unsqueeze(0)


def _fit_places(x: Tensor, used: Tensor) -> None:
    if x.dim() < 2 or x.shape[0] != 1 or not _are_places(used):
        raise misfit("rows_of_places", "values [1, places, ..] are in places [1, r]", x=x, used=used)


@operator("rows_of_places", results=lambda x, used: x.new_empty((1, used.shape[1], *x.shape[2:])), fit=_fit_places)
def rows_of_places(x: Tensor, used: Tensor) -> Tensor:
    return x.index_select(1, used[0])


@operator(
    "used_mm",
    results=lambda rows, matrices, *_: rows.new_empty((1, rows.shape[1], matrices.shape[2])),
    fit=lambda rows, matrices, ends, *_: _fit_mm(rows, matrices, ends),
)
def used_mm(rows: Tensor, matrices: Tensor, ends: Tensor, filled: float) -> Tensor:
    """`filled` is the share of places that have a row if tokens choose evenly; only the cost model uses it."""
    return mm_of_runs(rows[0], matrices, ends).unsqueeze(0)


def _fit_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
    meet = (rows.dim(), matrices.dim()) == (3, 3) and rows.shape[2] == matrices.shape[1] and rows.dtype == matrices.dtype
    if not meet or rows.shape[0] != 1 or not _are_ends(ends) or ends.shape[0] != matrices.shape[0]:
        rule = "rows [1, r, k] meet matrices [g, k, n] of their dtype, in runs that end at integers [g]"
        raise misfit("used_mm", rule, rows=rows, matrices=matrices, ends=ends)


@operator(
    "used_outer",
    results=lambda left, right, ends, *_: left.new_empty((ends.shape[0], left.shape[2], right.shape[2])),
    fit=lambda left, right, ends, *_: _fit_outer(left, right, ends),
)
def used_outer(left: Tensor, right: Tensor, ends: Tensor, filled: float) -> Tensor:
    return outer_of_runs(left[0], right[0], ends)


def _fit_outer(left: Tensor, right: Tensor, ends: Tensor) -> None:
    pair = (left.dim(), right.dim()) == (3, 3) and left.shape[:2] == right.shape[:2] and left.dtype == right.dtype
    if not pair or left.shape[0] != 1 or not _are_ends(ends):
        rule = "left [1, r, k] and right [1, r, n] are of one dtype, in runs that end at integers [g]"
        raise misfit("used_outer", rule, left=left, right=right, ends=ends)


@operator(
    "tokens_of_rows",
    results=lambda rows, used, tokens, *_: rows.new_empty((tokens, rows.shape[2])),
    fit=lambda rows, used, tokens, chosen: _fit_rows(
        "tokens_of_rows", rows, used, tokens * chosen, rows.dim() == 3 and tokens >= 0 and chosen >= 1
    ),
)
def tokens_of_rows(rows: Tensor, used: Tensor, tokens: int, chosen: int) -> Tensor:
    if rows.dtype in EXACT and not rows.is_cuda:  # terms are accumulated in their order
        return rows.new_zeros(tokens, rows.shape[2]).index_add_(0, used[0].div(chosen, rounding_mode="floor"), rows[0])
    return _scatter_to_places(rows, used, tokens * chosen).view(tokens, chosen, rows.shape[2]).sum(1)


@operator(
    "places_of_rows",
    results=lambda rows, used, places: rows.new_empty((1, places, *rows.shape[2:])),
    fit=lambda rows, used, places: _fit_rows("places_of_rows", rows, used, places, rows.dim() >= 2),
)
def places_of_rows(rows: Tensor, used: Tensor, places: int) -> Tensor:
    return _scatter_to_places(rows, used, places)


@operator("rows_spread", results=lambda rows, dim, size, start, step: rows.new_empty(_fit_spread(rows, dim, size, start, step)))
def rows_spread(rows: Tensor, dim: int, size: int, start: int, step: int) -> Tensor:
    """As `slice_backward`: rows at `start`, `start + step`, .. of a dim of `size`, zeros elsewhere."""
    shape = _fit_spread(rows, dim, size, start, step)
    out = rows.new_zeros(shape)
    where = tuple(slice(start, start + (rows.shape[dim] - 1) * step + 1, step) if place == dim else slice(None) for place in range(dim + 1))
    out[where] = rows
    return out


def _fit_spread(rows: Tensor, dim: int, size: int, start: int, step: int) -> list[int]:
    fits = 2 <= dim < rows.dim() and rows.shape[0] == 1 and start >= 0 and step >= 1
    if not fits or start + (rows.shape[dim] - 1) * step >= size:
        raise misfit("rows_spread", f"rows [1, r, ..] lie at {start}, {start + step}, .. of dim {dim}, 2 or more, of {size}", rows=rows)
    return [*rows.shape[:dim], size, *rows.shape[dim + 1 :]]


def _scatter_to_places(rows: Tensor, used: Tensor, places: int) -> Tensor:
    return rows.new_zeros((1, places, *rows.shape[2:])).index_copy_(1, used[0], rows)


def _fit_rows(operator: str, rows: Tensor, used: Tensor, places: int, fits: bool) -> None:
    if not fits or places < 0 or not _are_places(used) or rows.shape[:2] != used.shape:
        raise misfit(operator, f"rows [1, r, ..] are in places [1, r] of {places}, 0 or more", rows=rows, used=used)


def _are_places(used: Tensor) -> bool:
    return used.dim() == 2 and used.shape[0] == 1 and used.dtype == torch.int64


def _are_ends(ends: Tensor) -> bool:
    return ends.dim() == 1 and ends.dtype in INTEGERS
