"""Text formatting for tables: shardings, bytes, seconds, shares."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

from tabulate import tabulate
from torch.distributed.tensor import Replicate, Shard

from meshc.ir.layouts import torch_placements
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding

Cell = TypeVar("Cell")


def placement(sharding: Sharding | None, shape: tuple[int, ...]) -> str:
    """`[ffn 688/tp, hidden 256]`. Factors named only after a parameter show their size alone, so that equal layers have equal text."""
    if sharding is None:
        return f"[{', '.join(map(str, shape))}]"
    return f"[{', '.join(' * '.join(map(part_text, parts)) or '1' for parts in sharding.dims)}]"


def dtensor_placements(sharding: Sharding | None, mesh: Mesh, axes: Sequence[str]) -> str:
    """`Replicate, Shard(0)`: the placements of a stored DTensor, an entry for each of `axes`."""
    found = (Replicate(),) * len(mesh.names) if sharding is None else torch_placements(sharding, mesh)
    placed = dict(zip(mesh.names, found, strict=True))
    return ", ".join(f"Shard({one.dim})" if isinstance(one := placed[axis], Shard) else "Replicate" for axis in axes)


def part_text(part: Part) -> str:
    plain = "." in part.factor or not part.factor or re.fullmatch(r"f\d+", part.factor)
    return (f"{part.size}" if plain else f"{part.factor} {part.size}") + "".join(f"/{cut}" for cut in part.cuts)


def table(rows: Iterable[Sequence[object]], headers: list[str], title: str) -> str:
    """A title, and beneath it the rows, indented by two spaces."""
    text = tabulate(rows, headers=headers, disable_numparse=True)
    return f"{title}\n" + "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def without_columns(
    headers: Sequence[str], rows: Iterable[Sequence[Cell]], gone: Container[int]
) -> tuple[list[str], list[list[Cell]]]:
    """Headers and rows without the columns at the indices `gone`."""
    keep = [column for column in range(len(headers)) if column not in gone]
    return [headers[column] for column in keep], [[row[column] for column in keep] for row in rows]


def bytes_text(count: float, unit: str = "B") -> str:
    """`12.3 MB`: decimal units."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {prefix}{unit}"
    return f"{count:.0f} {unit}"


def seconds_text(seconds: float) -> str:
    """`12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 0.0) / 1e-6:.1f} us"


def share_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if part > 0 and whole else ""
