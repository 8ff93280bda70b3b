"""Operators that dispatch tokens to groups of experts and combine the results, with a bound on a group's rows per row of the batch.

    bounded_choices(choice [b, s, k], ...) -> expert [q, b, p], place [q, b, p]
    to_places(x [b, s, h], place) -> [q, b, p, h]                  the token of each place; zeros where there is none
    from_places(rows [q, b, p, h], place) -> [b, s, h]             the sum over all places of a token

Of the s * k choices of a row of the batch, those of one group fill its places from the front, ordered by expert. `place` is the number of
a choice, token * k + number, `expert` the expert's number in the group; -1 for an empty place. More choices than places are an error on
all ranks that have these choices. `in_places` and `over_places` are the same for a group that already has its tokens, [q, b, s, h].
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.errors import InputError
from meshc.ops.definition import operator, ops


@operator(
    "bounded_choices", "choice [groups, b, places], choice:int64 [groups, b, places]",
    "choice:integer [b, s, k], groups >= 0, each >= 1, places >= 0",
    rule="integers [b, s, k] choose among {groups} groups, 0 or more, of {each}, 1 or more, with {places} places, 0 or more",
)  # fmt: skip
def bounded_choices(choice: Tensor, groups: int, each: int, places: int, first: int, all_groups: int, at: str) -> tuple[Tensor, Tensor]:
    """Places of `groups` groups from number `first` on, of `all_groups`; `at`: the place in the model, for the error."""
    rows, tokens, chosen = choice.shape
    flat = choice.reshape(rows, tokens * chosen)
    _refuse_more(flat, each, places, all_groups, at)
    number = torch.arange(groups, device=choice.device, dtype=choice.dtype).view(-1, 1, 1) + first
    own = flat.unsqueeze(0) - number * each
    none = (own < 0) | (own >= each) | (flat < 0).unsqueeze(0)
    ordered, order = torch.sort(torch.where(none, each, own), dim=2, stable=True)
    ordered, order = ordered[:, :, :places], order[:, :, :places]
    if order.shape[2] < places:
        ordered = torch.nn.functional.pad(ordered, [0, places - order.shape[2]], value=each)
        order = torch.nn.functional.pad(order, [0, places - order.shape[2]])
    there = ordered < each
    return torch.where(there, ordered, -1), torch.where(there, order, -1)


def _refuse_more(flat: Tensor, each: int, places: int, groups: int, at: str) -> None:
    """Raises InputError if a group has more choices than places in a row of the batch; on CUDA an assertion on the device."""
    if flat.numel() == 0:
        return
    found = torch.where(flat < 0, groups, flat.div(each, rounding_mode="floor").clamp(max=groups))
    counts = torch.zeros(flat.shape[0], groups + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(1, found.long(), torch.ones_like(found, dtype=torch.int64))[:, :groups]
    if flat.is_cuda:
        torch._assert_async((counts <= places).all(), f"{at}: more choices than Options(experts=Experts(bound=)) leaves places")
        return
    if int(counts.max()) <= places:
        return
    row, group = divmod(int(counts.argmax()), groups)
    mine = flat[row][found[row] == group]
    most = int(mine.mode().values)
    error = InputError(
        f"{at or 'a layer'}: experts {group * each} to {(group + 1) * each - 1} are chosen {int(counts.max())} times in row {row} of the "
        f"batch (expert {most} alone {int((mine == most).sum())} times), and have {places} places there\n"
        "  what to do: a higher Options(experts=Experts(bound=)); without one there are places for whatever is chosen"
    )
    error.of_all = True
    raise error


@operator(
    "to_places", "x [q, b, p, h]", "x [b, s, h], place:int64 [q, b, p], chosen >= 1",
    rule="tokens [b, s, h] have places [q, b, p] of {chosen} choices, 1 or more",
    gradient=lambda grad, shape, place, chosen: ops.from_places(grad, place, shape[1], chosen),
)  # fmt: skip
def to_places(x: Tensor, place: Tensor, chosen: int) -> Tensor:
    return _gather_tokens(x.unsqueeze(0).expand(place.shape[0], -1, -1, -1), place, chosen)


@operator(
    "in_places", "x [q, b, p, h]", "x [q, b, s, h], place:int64 [q, b, p], chosen >= 1",
    rule="tokens [q, b, s, h] have places [q, b, p] of {chosen} choices, 1 or more",
)  # fmt: skip
def in_places(x: Tensor, place: Tensor, chosen: int) -> Tensor:
    """`to_places` for tokens that each group already has: [q, b, s, h] -> [q, b, p, h]."""
    return _gather_tokens(x, place, chosen)


_ROWS = "rows [q, b, p, h], place:int64 [q, b, p], tokens >= 0, chosen >= 1"
_RULE = "rows [q, b, p, h] have places [q, b, p] of {tokens} tokens, 0 or more, with {chosen} choices, 1 or more"


@operator("from_places", "rows [b, tokens, h]", _ROWS, rule=_RULE, gradient=lambda grad, place, chosen: ops.to_places(grad, place, chosen))
def from_places(rows: Tensor, place: Tensor, tokens: int, chosen: int) -> Tensor:
    return _scatter_add_rows(rows, place, tokens, chosen).sum(0)


@operator("over_places", "rows [q, b, tokens, h]", _ROWS, rule=_RULE)
def over_places(rows: Tensor, place: Tensor, tokens: int, chosen: int) -> Tensor:
    """`from_places` without the sum over groups: [q, b, p, h] -> [q, b, s, h]."""
    return _scatter_add_rows(rows, place, tokens, chosen)


def _gather_tokens(x: Tensor, place: Tensor, chosen: int) -> Tensor:
    there = (place >= 0) & (place < x.shape[2] * chosen)
    token = torch.where(there, place, 0).div(chosen, rounding_mode="floor").unsqueeze(3)
    if x.shape[2] == 0:
        return x.new_zeros(*place.shape, x.shape[3])
    found = movable(x).gather(2, token.expand(-1, -1, -1, x.shape[3])).view(x.dtype)
    return torch.where(there.unsqueeze(3), found, 0.0)


def movable(x: Tensor) -> Tensor:
    """x, in a dtype of the same size of which a CPU gathers and copies rows by index: it has no such kernels for 8-bit floats."""
    return x.view(torch.uint8) if x.is_floating_point() and x.itemsize == 1 else x


def _scatter_add_rows(rows: Tensor, place: Tensor, tokens: int, chosen: int) -> Tensor:
    made = rows.new_zeros(*rows.shape[:2], tokens, rows.shape[3])
    if tokens == 0:
        return made
    there = (place >= 0) & (place < tokens * chosen)
    token = torch.where(there, place, 0).div(chosen, rounding_mode="floor").unsqueeze(3)
    return made.scatter_add_(2, token.expand(-1, -1, -1, rows.shape[3]), torch.where(there.unsqueeze(3), rows, 0.0))
