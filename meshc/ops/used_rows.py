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

from meshc.ops.definition import misfit, operator
from meshc.ops.grouped_mm import mm_of_runs, outer_of_runs

EXACT = (torch.float32, torch.float64)
"""Dtypes in which sums are accumulated in order; shorter ones are widened first."""


@operator(
    "used_rows",
    results=lambda own, count, t, m: (own.new_empty((1, t * m), dtype=torch.int64), own.new_empty(count, dtype=torch.int64)),
    fit="own:integer [1, t, m], count >= 1",
    rule="integers [1, t, m] choose among {count} experts, 1 or more",
)
def used_rows(own: Tensor, count: int) -> tuple[Tensor, Tensor]:
    choice = own.reshape(1, -1)
    ordered, order = torch.sort(torch.where((choice < 0) | (choice >= count), count, choice), dim=1, stable=True)
    ends = torch.searchsorted(ordered[0], torch.arange(count, dtype=ordered.dtype, device=own.device), right=True)
    return order[:, : int(ends[-1])].contiguous(), ends


@operator(
    "rows_of_tokens", "x [1, r, h]", "x [t, h], used:int64 [1, r], chosen >= 1",
    rule="tokens [t, h] are in places [1, r] of {chosen} choices, 1 or more",
)  # fmt: skip
def rows_of_tokens(x: Tensor, used: Tensor, chosen: int) -> Tensor:
    return x.index_select(0, used[0].div(chosen, rounding_mode="floor")).unsqueeze(0)


@operator(
    "rows_of_places", "x [1, r, ..]", "x [1, places, ..], used:int64 [1, r]", rule="values [1, places, ..] are in places [1, r]"
)
def rows_of_places(x: Tensor, used: Tensor) -> Tensor:
    return x.index_select(1, used[0])


@operator(
    "used_mm", "rows [1, r, n]", "rows [1, r, k], matrices:rows [g, k, n], ends:integer [g]",
    rule="rows [1, r, k] meet matrices [g, k, n] of their dtype, in runs that end at integers [g]",
)  # fmt: skip
def used_mm(rows: Tensor, matrices: Tensor, ends: Tensor, filled: float) -> Tensor:
    """`filled` is the share of places that have a row if tokens choose evenly; only the cost model uses it."""
    return mm_of_runs(rows[0], matrices, ends).unsqueeze(0)


@operator(
    "used_outer", "left [g, k, n]", "left [1, r, k], right:left [1, r, n], ends:integer [g]",
    rule="left [1, r, k] and right [1, r, n] are of one dtype, in runs that end at integers [g]",
)  # fmt: skip
def used_outer(left: Tensor, right: Tensor, ends: Tensor, filled: float) -> Tensor:
    return outer_of_runs(left[0], right[0], ends)


@operator(
    "tokens_of_rows", "rows [tokens, h]", "rows [1, r, h], used:int64 [1, r], tokens >= 0, chosen >= 1",
    rule="rows [1, r, h] are in places [1, r] of {tokens} tokens, 0 or more, with {chosen} choices, 1 or more",
)  # fmt: skip
def tokens_of_rows(rows: Tensor, used: Tensor, tokens: int, chosen: int) -> Tensor:
    if rows.dtype in EXACT and not rows.is_cuda:  # terms are accumulated in their order
        return rows.new_zeros(tokens, rows.shape[2]).index_add_(0, used[0].div(chosen, rounding_mode="floor"), rows[0])
    return _scatter_to_places(rows, used, tokens * chosen).view(tokens, chosen, rows.shape[2]).sum(1)


@operator(
    "places_of_rows", "rows [1, places, ..]", "rows [1, r, ..], used:int64 [1, r], places >= 0",
    rule="rows [1, r, ..] are in places [1, r] of {places}, 0 or more",
)  # fmt: skip
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
