"""Conversion of optimizer state between formats: the dtype of the optimizer, bfloat16, 8-bit codes and scales.

{"exp_avg": float32}                             wanted as codes and scales      encoded, each element to the nearest code
{"exp_avg.codes": uint8, "exp_avg.scale": ..}    wanted as "exp_avg"             decoded
between float32 and bfloat16                                                     a cast, which the caller does
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshc.errors import StateError
from meshc.ops import block_codes
from meshc.optimizer.spec import CODES, SCALE, Slot

Whole = Callable[[Tensor], Tensor]
"""A state entry -> its full tensor, unsharded and without a tensor subclass."""


def convert_state(slot: Slot, entries: Mapping[str, object], whole: Whole) -> object | None:
    """The value of `slot`, converted from the state entries of its parameter; None if `entries` have it in no format."""
    found = entries.get(slot.name)
    if found is not None:
        return found
    plain = entries.get(slot.plain)
    if slot.part and isinstance(plain, Tensor):
        plain = whole(plain)
        values = plain if plain.dtype == torch.float64 else plain.to(torch.float32)
        return block_codes.encode(values, slot.signed)[0 if slot.part == CODES else 1]
    codes, scale = entries.get(slot.name + CODES), entries.get(slot.name + SCALE)
    if slot.wide_or_narrow and isinstance(codes, Tensor) and isinstance(scale, Tensor):
        # a loader of torch's may have cast both to the parameter's dtype, in which codes are exact
        wide = slot.computed or slot.dtype
        return block_codes.decode(whole(codes).to(torch.uint8), whole(scale).to(torch.float32), slot.signed, wide)
    return None


def alternative_names(slot: Slot) -> tuple[str, ...]:
    """Names of the entries that hold the value of `slot` in another format."""
    return (slot.plain,) if slot.part else (slot.name + CODES, slot.name + SCALE)


def refuse_fewer_bits(optimizer: str, slot: Slot, entries: Mapping[str, object], param: torch.dtype) -> None:
    """For a program that stores state as the optimizer does: raises StateError for state in fewer bits than a parameter of dtype `param`
    has, which is fewer than the optimizer itself would use."""
    held = entries.get(slot.name)
    narrow = isinstance(held, Tensor) and held.is_floating_point() and held.dtype.itemsize < param.itemsize
    kind = "8bit" if slot.name + CODES in entries else "bf16" if narrow and slot.wide else None
    if kind is None:
        return
    found = f"{slot.name}{CODES}" if kind == "8bit" else f"{slot.name} in bfloat16"
    raise StateError(
        f"{optimizer} holds state in fewer bits than this program would keep: {found}, of a parameter of shape {list(slot.size)}\n"
        f"  why: a program with Options(training=Training(optimizer_state={kind!r})) has left it, and this one is compiled without\n"
        f"  what to do: Options(training=Training(optimizer_state={kind!r})); or, to go on in full, give TrainStep a new optimizer, and\n"
        "  its program the state of the old one: program.load_state_dict(old.state_dict(full=True)) reads either kind"
    )
