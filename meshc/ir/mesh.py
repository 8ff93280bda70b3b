"""The device mesh as a value: named axes, their sizes, and the rank at each position. No process group is needed.

    >>> mesh = Mesh("dp=2,tp=4")
    >>> mesh.world_size, mesh.coordinates(6)
    (8, {'dp': 1, 'tp': 2})
    >>> mesh.groups("dp")
    [[0, 4], [1, 5], [2, 6], [3, 7]]

Ranks are in row-major order: the last axis varies fastest. A mesh taken from a ``torch.distributed.DeviceMesh`` keeps that mesh's ranks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch.distributed.device_mesh import DeviceMesh

from meshc.errors import PlanError
from meshc.ir.bounds import MOST_RANKS

EXAMPLE: Final = 'for example: Mesh("dp=2,tp=4") or Mesh("dp=2,tp=4", device="cuda")'
NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)

RESERVED: Final = ("store", "remat", "keep", "offload", "chunk", "precision", "compress", "sparse")
"""First words of plan lines, which are no axis names."""

ROLES: Final[Mapping[str, str]] = {
    "dp": "dp",
    "batch": "dp",
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "fsdp": "dp_shard",
    "tp": "tp",
    "sp": "sp",
    "cp": "cp",
    "ep": "ep",
    "ep_across": "ep",
    "ep_inside": "ep",
    "pp": "pp",
}
"""Axis name -> role. These names and no others carry a role; an axis of another name needs a plan entry."""

DATA_ROLES: Final = frozenset({"dp", "dp_replicate", "dp_shard", "ep"})
"""Roles of the axes along which ``inputs="local"`` takes a rank's part of the batch."""


def role(axis_name: str) -> str | None:
    """The role that an axis's name carries (``batch`` is ``dp``, ``fsdp`` is ``dp_shard``), or None."""
    return ROLES.get(axis_name)


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """Axis -> number of ranks along it, major to minor."""
    return dict(zip(mesh.names, mesh.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh: its name and the number of ranks along it."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Named axes over ranks; frozen, hashable, and equal to any mesh of the same axes, device type and ranks.

    ``Mesh(text, device=None)`` reads ``AXIS=SIZE, ... [ranks R R ...] [on DEVICE]``, which is also what ``str(mesh)`` prints.
    Raises PlanError, with the faults marked in the text.
    """

    axes: tuple[Axis, ...]
    device_type: str
    ranks: tuple[int, ...]
    """The global rank at each position, row-major over ``axes``; usually 0, 1, 2, ..."""
    device_mesh: DeviceMesh | None = field(compare=False)
    """The DeviceMesh that this mesh was taken from; it takes no part in equality."""

    def __init__(self, text: str, device: str | None = None) -> None:
        axes, ranks, text_device = _parse(text)
        if device is not None and text_device is not None and device != text_device:
            raise PlanError(f"mesh {text!r} is on {text_device}, but device={device!r} was given: keep one of the two")
        self._fill(axes, device or text_device or "cpu", ranks, None)

    @classmethod
    def from_axes(cls, axes: Iterable[Axis | tuple[str, int]], device: str = "cpu", ranks: Iterable[int] | None = None) -> Mesh:
        """A mesh of these axes, major to minor; ``ranks`` is the row-major rank table, 0, 1, 2, ... by default."""
        mesh = object.__new__(cls)
        typed = tuple(axis if isinstance(axis, Axis) else Axis(*axis) for axis in axes)
        mesh._fill(typed, device, None if ranks is None else tuple(ranks), None)
        return mesh

    @classmethod
    def of(cls, mesh: Mesh | DeviceMesh) -> Mesh:
        """The mesh itself, or the mesh that a ``torch.distributed.DeviceMesh`` describes.

        Raises PlanError if the DeviceMesh has no axis names.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if not isinstance(mesh, DeviceMesh):
            raise PlanError(f"a mesh is a torch.distributed.DeviceMesh or a meshc.Mesh, not {type(mesh).__name__}: {mesh!r}; {EXAMPLE}")
        shape = tuple(mesh.mesh.shape)
        if mesh.mesh_dim_names is None:
            names = ", ".join(f'"{name}"' for name in ("dp", "tp", "cp", "pp")[: len(shape)])
            comma = "," if len(shape) == 1 else ""
            raise PlanError(
                f"the DeviceMesh of shape {shape} has no axis names, and the names say what each axis is for; write\n"
                f'    init_device_mesh("{mesh.device_type}", {shape}, mesh_dim_names=({names}{comma}))'
            )
        made = object.__new__(cls)
        axes = tuple(Axis(name, int(size)) for name, size in zip(mesh.mesh_dim_names, shape, strict=True))
        made._fill(axes, mesh.device_type, tuple(int(rank) for rank in mesh.mesh.flatten().tolist()), mesh)
        return made

    def _fill(self, axes: tuple[Axis, ...], device_type: str, ranks: tuple[int, ...] | None, device_mesh: DeviceMesh | None) -> None:
        names = [axis.name for axis in axes]
        count = math.prod(axis.size for axis in axes)
        if count > MOST_RANKS:
            raise PlanError(f"mesh {','.join(map(str, axes))!r} has {count} ranks; at most {MOST_RANKS} are possible")
        table = tuple(range(count)) if ranks is None else ranks
        faults = [] if axes else ["a mesh has at least one axis"]
        faults += [f"{axis.name!r} is not a name: letters, digits and _" for axis in axes if not NAME.fullmatch(axis.name)]
        faults += [f"no axis may be called {axis.name}: lines of plans begin with it" for axis in axes if axis.name in RESERVED]
        faults += [f"axis {axis.name} has size {axis.size}: a size is at least 1" for axis in axes if axis.size < 1]
        faults += [f"axis {name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
        if not NAME.fullmatch(device_type):
            faults.append(f"{device_type!r} is no device type: cpu, cuda, ... without a number")
        if len(table) != count or len(set(table)) != count or min(table, default=0) < 0:
            faults.append(f"its rank table {_brief(table)} should hold {count} different ranks, one for each position")
        if faults:
            raise PlanError(f"mesh {','.join(map(str, axes))!r}: {'; '.join(faults)}; {EXAMPLE}")
        for name, value in (("axes", axes), ("device_type", device_type), ("ranks", table), ("device_mesh", device_mesh)):
            object.__setattr__(self, name, value)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, major to minor."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' sizes, major to minor."""
        return tuple(axis.size for axis in self.axes)

    @property
    def world_size(self) -> int:
        """The number of ranks in the mesh."""
        return len(self.ranks)

    def size(self, name: str) -> int:
        """The number of ranks along one axis. Raises PlanError for a name that the mesh does not have."""
        return self.axes[self._position(name)].size

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank: axis name -> index along it, axes major to minor."""
        if rank not in self.ranks:
            raise PlanError(f"rank {rank} is not in the mesh {self}, whose {self.world_size} ranks are {_brief(self.ranks)}")
        index = self.ranks.index(rank)
        found: dict[str, int] = {}
        for axis in reversed(self.axes):
            index, found[axis.name] = divmod(index, axis.size)
        return dict(reversed(found.items()))

    @property
    def pipeline_axis(self) -> Axis | None:
        """The axis of pipeline stages, if there is one with more than one rank."""
        return next((axis for axis in self.axes if role(axis.name) == "pp" and axis.size > 1), None)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different parts of a batch, with `inputs="local"`: of a data role, and of several ranks."""
        return tuple(axis.name for axis in self.axes if role(axis.name) in DATA_ROLES and axis.size > 1)

    @property
    def data_ranks(self) -> int:
        """Number of these parts."""
        return math.prod(self.size(name) for name in self.data_axes)

    def data_groups(self) -> list[list[int]]:
        """The ranks that have the same part, a list for each part, in the order of the batch."""
        return self.groups([name for name in self.names if name not in self.data_axes])

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates, one for each axis."""
        faults = [f"axis {name} is not in the mesh" for name in coordinates if name not in self.names]
        index = 0
        for axis in self.axes:
            at = coordinates.get(axis.name)
            if at is None:
                faults.append(f"axis {axis.name} has no coordinate")
            elif not 0 <= at < axis.size:
                faults.append(f"axis {axis.name} has coordinates 0 to {axis.size - 1}, not {at}")
            else:
                index = index * axis.size + at
        if faults:
            raise PlanError(f"coordinates {dict(coordinates)} in the mesh {self}: {'; '.join(faults)}")
        return self.ranks[index]

    def groups(self, axes: str | Iterable[str]) -> list[list[int]]:
        """The ranks that differ in these axes only, a list for each group; every rank is in exactly one.

        Within a group the first axis named varies slowest, so a group lists its ranks in the order of the shards of a dim
        split by these axes, major to minor. Groups come in the order of the other axes.
        """
        inner = [axes] if isinstance(axes, str) else list(axes)
        sizes = [self.size(name) for name in inner]
        if len(set(inner)) != len(inner):
            raise PlanError(f"groups over {', '.join(inner)}: an axis is named twice")
        outer = [axis for axis in self.axes if axis.name not in inner]
        return [
            [
                self.rank(dict(zip((axis.name for axis in outer), at, strict=True)) | dict(zip(inner, shard, strict=True)))
                for shard in itertools.product(*map(range, sizes))
            ]
            for at in itertools.product(*(range(axis.size) for axis in outer))
        ]

    def _position(self, name: str) -> int:
        if name not in self.names:
            raise PlanError(f"axis {name!r} is not in the mesh {self}, whose axes are {', '.join(self.names)}")
        return self.names.index(name)

    def __str__(self) -> str:
        text = ",".join(map(str, self.axes))
        if self.ranks != tuple(range(self.world_size)):
            text += f" ranks {' '.join(map(str, self.ranks))}"
        return text if self.device_type == "cpu" else f"{text} on {self.device_type}"

    def __repr__(self) -> str:
        return f"Mesh({str(self)!r})"


_TEXT = re.compile(r"(?P<axes>.*?)(?:\s+ranks\s+(?P<ranks>\d[\d\s]*?))?(?:\s+on\s+(?P<device>\w+))?\s*", re.ASCII | re.DOTALL)
_FIELD = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<size>\d+)\s*", re.ASCII)


def _parse(text: str) -> tuple[tuple[Axis, ...], tuple[int, ...] | None, str | None]:
    if not isinstance(text, str):
        raise PlanError(f"a mesh is made from text, not from {type(text).__name__} (Mesh.of takes a DeviceMesh); {EXAMPLE}")
    whole = _TEXT.fullmatch(text)
    assert whole is not None
    axes: list[Axis] = []
    faults: list[tuple[int, str]] = []
    column = 0
    for part in whole["axes"].split(","):
        match = _FIELD.fullmatch(part)
        at = column + len(part) - len(part.lstrip())
        if match is None:
            faults.append((at, "an axis is NAME=SIZE"))
        elif len(match["size"]) > len(str(MOST_RANKS)):
            faults.append((column + match.start("size"), f"a size is at most {MOST_RANKS}"))
        elif int(match["size"]) < 1:
            faults.append((column + match.start("size"), "a size is at least 1"))
        elif any(axis.name == match["name"] for axis in axes):
            faults.append((at, f"axis {match['name']} is there twice"))
        else:
            axes.append(Axis(match["name"], int(match["size"])))
        column += len(part) + 1
    if faults:
        marks = "".join(f"\n    {' ' * at}^ {why}" for at, why in faults)
        raise PlanError(f"this mesh cannot be read:\n    {text}{marks}\n{EXAMPLE}")
    numbers = (whole["ranks"] or "").split()
    if any(len(number) > 18 for number in numbers):
        raise PlanError(f"mesh {text[:60]!r} names a rank of more than 18 digits")
    ranks = None if whole["ranks"] is None else tuple(map(int, numbers))
    return tuple(axes), ranks, whole["device"]


def _brief(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... {ranks[-1]}"
