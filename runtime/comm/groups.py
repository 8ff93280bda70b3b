"""Process groups of one program: for any mesh axes, the ranks that differ along these axes only.

The groups are meshc's own. The default group and those of the user's DeviceMesh may be used by other threads at any time (that of
`torch.distributed.checkpoint.async_save`, say), and messages that two threads send on one group are matched in any order. Creating a group
takes all ranks, in one order, so groups are created where ranks compile and load. Programs of one process run one after the other, and
share the groups of equal ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshc.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SENDS: Final = -1
"""Last element of a pair's key, for a group in which the first of the two ranks sends."""

_OWN: Final[WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup | None]]] = WeakKeyDictionary()
"""Default group -> the groups created under it, by their ranks in order; None for those that this rank is not in."""


def own_groups(world: ProcessGroup | None) -> list[ProcessGroup]:
    """meshc's groups that this rank is in."""
    return [] if world is None else [group for group in _OWN.get(world, {}).values() if group is not None]


def _own_group(ranks: Sequence[int], key: tuple[int, ...]) -> ProcessGroup | None:
    world = dist.group.WORLD
    assert world is not None
    made = _OWN.setdefault(world, {})
    if key not in made:
        ascending = list(ranks) == sorted(ranks)
        # Only ranks out of order need the keyword, which torch has not always had.
        found = dist.new_group(list(ranks)) if ascending else dist.new_group(list(ranks), sort_ranks=False)
        made[key] = found if dist.get_rank() in ranks else None
    return made[key]


class Groups:
    """Makes each group once, in an order that is the same on all ranks.

    sizes: axis name -> number of ranks along it, major to minor. rank_of: the rank at each position, row-major over the axes (that of
    `device_mesh`, if there is one); 0, 1, 2, ... by default.
    Raises StateError if the axes do not account for every rank of the world.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        rank: int,
        world_size: int,
        device_mesh: DeviceMesh | None = None,
        rank_of: torch.Tensor | None = None,
    ) -> None:
        self.sizes = dict(sizes)
        self._rank = rank
        count = math.prod(self.sizes.values())
        if count != world_size:
            axes = ",".join(f"{name}={size}" for name, size in self.sizes.items())
            raise StateError(
                f"the program is for the {count} ranks of the mesh {axes}, but {world_size} were started: "
                f"start {count}, or compile for {world_size}"
            )
        if rank_of is None:
            rank_of = torch.arange(count) if device_mesh is None else device_mesh.mesh
        self._rank_of = rank_of.reshape(tuple(self.sizes.values()))
        self.world = _own_group(range(world_size), tuple(range(world_size))) if world_size > 1 else None
        """All ranks, in the order of ranks."""
        self._groups: dict[tuple[str, ...], ProcessGroup | None] = {}
        self._pairs: dict[tuple[str, int, int], ProcessGroup] = {}
        self._paired: set[tuple[str, int, int]] = set()

    def prepare(self, wanted: Iterable[Iterable[str]]) -> None:
        """Makes the groups over each of these axes. All ranks call it, with the same list, before any calls `group`."""
        for axes in wanted:
            self._group(tuple(axes))

    def group(self, axes: Iterable[str]) -> ProcessGroup | None:
        """The prepared group of this rank over `axes`, None if that is this rank alone.

        Its members are in row-major order of the axes as given: the first varies slowest.
        """
        key = tuple(axes)
        if key not in self._groups:
            raise StateError(f"no group over the axes {key} was prepared when the program was loaded; there are: {list(self._groups)}")
        return self._groups[key]

    def members(self, axes: Iterable[str]) -> list[list[int]]:
        """The ranks of every group over `axes`, a list for each group; every rank is in exactly one."""
        names = list(self.sizes)
        inner = [names.index(name) for name in axes]
        outer = [dim for dim in range(len(names)) if dim not in inner]
        size = math.prod(self._rank_of.shape[dim] for dim in inner)
        return [list(map(int, row)) for row in self._rank_of.permute(*outer, *inner).reshape(-1, size).tolist()]

    def pairs(self, axis: str, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], ProcessGroup]:
        """For each pair (coordinate that sends, one that receives) on an axis, a group of the two; those that this rank is in.

        All ranks call it, with the same pairs in the same order. A pair and its reverse have different groups.
        """
        wanted = list(wanted)
        for pair in wanted:
            if (axis, *pair) in self._paired:
                continue
            self._paired.add((axis, *pair))
            for row in self.members([axis]):
                ranks = [row[place] for place in pair]
                made = _own_group(sorted(ranks), (*ranks, SENDS))
                if made is not None:
                    self._pairs[(axis, *pair)] = made
        return {pair: self._pairs[(axis, *pair)] for pair in wanted if (axis, *pair) in self._pairs}

    def _group(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        if axes in self._groups:
            return self._groups[axes]
        # Axes of size 1 do not matter, and (dp, one) and (dp) are one group.
        wide = tuple(name for name in axes if self.sizes[name] > 1)
        if not wide:
            group = None
        elif wide != axes:
            group = self._group(wide)
        else:
            group = self._make(wide)
        self._groups[axes] = group
        return group

    def _make(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """This rank's group over `axes`. All ranks create all groups, in the same order."""
        found = [_own_group(row, tuple(row)) for row in self.members(axes)]
        return next((group for group in found if group is not None), None)
