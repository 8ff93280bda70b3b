"""`meshc::check_index`: bounds check of an index, which is returned unchanged or raises an error.

    check_index(index, low, high, ignore, of, at, whole) -> index        low <= value < high, or value == ignore

A rank reads the rows of its tile and takes rows of other ranks for zero, so an index out of range would give a row of zeros, or no loss,
where a single device raises. `of` and `at` name in the error the values and the place in the model that reads them; `whole`: every rank
has the same values, so that all ranks raise. On CUDA the check is an assertion on the device, as in torch, which does not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.errors import InputError
from meshc.ops.definition import operator


@operator("check_index", results=lambda index, *_: torch.empty_like(index))
def check_index(index: Tensor, low: int, high: int, ignore: int | None, of: str, at: str, whole: bool = False) -> Tensor:
    if index.numel() == 0:
        return index.clone()
    if index.device.type == "cuda":
        torch._assert_async(_legal(index, low, high, ignore).all(), f"{of} at {at}: {_range(low, high, ignore)}")
        return index.clone()
    least, most = torch.aminmax(index)
    if not (low <= int(least) and int(most) < high):
        _refuse(index, low, high, ignore, of, at, whole)
    return index.clone()


def _legal(index: Tensor, low: int, high: int, ignore: int | None) -> Tensor:
    inside = (index >= low) & (index < high)
    return inside if ignore is None else inside | (index == ignore)


def _refuse(index: Tensor, low: int, high: int, ignore: int | None, of: str, at: str, whole: bool) -> None:
    """Raises InputError if a value is out of range and not `ignore`."""
    outside = index[~_legal(index, low, high, ignore)]
    if outside.numel() == 0:
        return
    several = f"{outside.numel()} of {index.numel()} values are such, from {int(outside.min())} to {int(outside.max())}"
    error = InputError(
        f"{of} holds {int(outside[0])}, {_range(low, high, ignore)}\n"
        f"  in your model: {at or 'a line that is not known'}\n"
        f"  how many: {several if outside.numel() > 1 else f'one value of {index.numel()}'}\n"
        "  what to do: look where these values come from (a tokenizer of another vocabulary, labels of another data set); "
        "meshc.Options(debugging=meshc.Debugging(check_indices=False)) leaves the check out, and such a row then counts as zeros"
    )
    error.of_all = whole
    raise error


def _range(low: int, high: int, ignore: int | None) -> str:
    legal = f"{low} to {high - 1}" if high > low else "nothing"
    return f"where {legal} is legal" + ("" if ignore is None else f", and {ignore}, which is ignored")
