"""Combinations of recipes for the open axes of a mesh, as an expert would choose them.

    combinations(["dp", "tp"])

        ddp+megatron      dp: batch                                   tp: heads, ffn, vocab > features@products
        ...
        fsdp+megatron_sp  dp: batch; store params, grads, state       tp: heads, ffn, vocab > seq > features@products
        ...
        fsdp over dp, tp  dp: batch; store params, grads, state       tp: batch; store params, grads, state

An axis takes a recipe of its role, or splits the batch like the data axes. All data axes take the same recipe; or, of several, the last
one shards what is stored and the others replicate (HSDP). An axis whose name has no role may take any recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Final

from meshc.ir.mesh import DATA_ROLES, role
from meshc.plan.entries import AxisEntry
from meshc.plan.recipes import RECIPES, write_entry

DATA: Final = "data"
OF_ROLE: Final[Mapping[str | None, tuple[str, ...]]] = {
    **dict.fromkeys(DATA_ROLES, (DATA,)),
    "tp": ("megatron", "megatron_sp", "ulysses", DATA),
    "sp": ("megatron_sp", DATA),
    "cp": ("ulysses", DATA),
    None: (DATA, "megatron", "megatron_sp", "ulysses"),
}
"""Role -> recipes that its axes may take; DATA: the recipe of the data axes."""


def combinations(axes: Sequence[str], *, step: bool = True, local: bool = False) -> Iterator[tuple[str, tuple[AxisEntry, ...]]]:
    """(name, an entry for each of the axes) of each combination.

    step   whether it is a training step, whose optimizer state may be sharded differently from its parameters
    local  whether each rank is given its own part of the batch: then only data axes split it
    """
    each = [[one for one in OF_ROLE[role(axis)] if one != DATA or not local or role(axis) in DATA_ROLES] for axis in axes]
    for picked in product(*each):
        data = [axis for axis, one in zip(axes, picked, strict=True) if one == DATA]
        for recipes in _of_data(data, step):
            taken = [recipes.get(axis, one) for axis, one in zip(axes, picked, strict=True)]
            texts = [RECIPES[one].entries[0][1] for one in taken]  # whatever roles the axes' names have
            yield _name(axes, taken), tuple(map(write_entry, axes, texts, [f"recipe {one}" for one in taken]))


def _of_data(axes: Sequence[str], step: bool) -> Iterator[dict[str, str]]:
    """The recipe of each data axis, in each combination."""
    if not axes:
        yield {}
        return
    for one in ("ddp", "zero1", "fsdp") if step else ("ddp", "fsdp"):
        yield dict.fromkeys(axes, one)
    if len(axes) > 1:
        yield {**dict.fromkeys(axes[:-1], "ddp"), axes[-1]: "fsdp"}


def _name(axes: Sequence[str], taken: Sequence[str]) -> str:
    parts = []
    for one in dict.fromkeys(taken):
        mine = [axis for axis, recipe in zip(axes, taken, strict=True) if recipe == one]
        fits = all(RECIPES[one].entry(axis) is not None for axis in mine)
        alone = set(mine) == {axis for axis in axes if RECIPES[one].entry(axis) is not None}
        parts.append(one if fits and alone else f"{one} over {', '.join(mine)}")
    return "+".join(parts) if not any(" " in part for part in parts) else "; ".join(parts)
