"""Differences between two programs of one model: plan lines, shardings, collectives, memory, predicted time.

    plan
      - dp: batch
      + dp: batch; store params, grads, state
    collectives of one call (bytes on a rank)
      phase    collective    axes    -              +
      update   all_reduce    dp      1 x, 8.2 kB    -

Only parts that differ are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

from meshc.ir import PHASES
from meshc.plan.entries import STORES
from meshc.report.figures import CollectiveFigures, Figures
from meshc.report.summary import collapse_layers
from meshc.report.tables import bytes_text, seconds_text, table


class StorageChange(TypedDict):
    """Parameters of equal layers, and the shardings of params, grads or state that differ between the programs."""

    parameter: str
    count: int
    kinds: list[str]
    one: str
    other: str


class MovedChange(TypedDict):
    """Collectives of one kind over the same axes in one phase, in either program."""

    phase: str
    collective: str
    axes: list[str]
    one_count: int
    other_count: int
    one_bytes_per_rank: int
    other_bytes_per_rank: int


class Differences(TypedDict):
    """Differences of two programs' figures, part by part."""

    said: dict[str, list[str]]
    removed: list[str]
    added: list[str]
    storage: list[StorageChange]
    collectives: list[MovedChange]
    memory_bytes: dict[str, list[float]]
    seconds: dict[str, list[float]]


def differences(one: Figures, other: Figures) -> Differences:
    """The differences; in each pair the figure of `one` comes first."""
    said = {key: [str(one[key]), str(other[key])] for key in ("mode", "mesh", "microbatches", "device") if one[key] != other[key]}
    return Differences(
        said=said,
        removed=[line for line in one["plan"] if line not in other["plan"]],
        added=[line for line in other["plan"] if line not in one["plan"]],
        storage=_storage(one["storage"], other["storage"]),
        collectives=_collectives(one["collectives"], other["collectives"]),
        memory_bytes=_pairs(one["memory_bytes"], other["memory_bytes"]),
        seconds=_pairs(one["seconds"], other["seconds"]),
    )


def text(found: Differences, names: tuple[str, str]) -> str:
    """The differences as tables. `names`: names of the two programs."""
    head = "\n".join(f"{sign} {name.strip().splitlines()[0]}" for sign, name in zip("-+", names, strict=True))
    blocks = [head, *(f"{key}\n  - {pair[0]}\n  + {pair[1]}" for key, pair in found["said"].items())]
    if found["removed"] or found["added"]:
        lines = [*(f"  - {line}" for line in found["removed"]), *(f"  + {line}" for line in found["added"])]
        blocks.append("\n".join(["plan", *lines]))
    if found["storage"]:
        stored = [[row["parameter"], row["count"], ", ".join(row["kinds"]), row["one"], row["other"]] for row in found["storage"]]
        blocks.append(table(stored, ["parameter", "count", "of it", "-", "+"], "how parameters lie between steps (sizes are global)"))
    if found["collectives"]:
        moved = [
            [
                row["phase"], row["collective"], ", ".join(row["axes"]), _count(row["one_count"], row["one_bytes_per_rank"]),
                _count(row["other_count"], row["other_bytes_per_rank"]),
            ]
            for row in found["collectives"]
        ]  # fmt: skip
        blocks.append(table(moved, ["phase", "collective", "axes", "-", "+"], "collectives of one call (bytes on a rank)"))
    blocks += [
        table(_figures(pairs, shown), [what, "-", "+", ""], title)
        for what, pairs, shown, title in (
            ("memory", found["memory_bytes"], bytes_text, "memory of a rank (predicted)"),
            ("takes", found["seconds"], seconds_text, "predicted time of a call"),
        )
        if pairs
    ]
    return "\n\n".join(blocks if len(blocks) > 1 else [head, "nothing differs"])


def _storage(one: Mapping[str, Mapping[str, str]], other: Mapping[str, Mapping[str, str]]) -> list[StorageChange]:
    """Parameters whose sharding differs; those whose names differ in numbers only, with equal shardings, are one row."""
    groups: Counter[tuple[str, tuple[str, ...], str, str]] = Counter()
    for name in dict.fromkeys((*one, *other)):
        pairs: dict[tuple[str, str], tuple[str, ...]] = {}
        for kind in STORES:
            before, after = (program.get(name, {}).get(kind, "") for program in (one, other))
            if before != after:
                pairs[before, after] = (*pairs.get((before, after), ()), kind)
        groups.update((collapse_layers(name), kinds, before, after) for (before, after), kinds in pairs.items())
    return [
        StorageChange(parameter=name, count=count, kinds=list(kinds), one=before, other=after)
        for (name, kinds, before, after), count in groups.items()
    ]


def _collectives(one: Sequence[CollectiveFigures], other: Sequence[CollectiveFigures]) -> list[MovedChange]:
    mine, theirs = ({(row["phase"], row["collective"], *row["axes"]): row for row in rows} for rows in (one, other))
    found = []
    for key, row in sorted({**mine, **theirs}.items(), key=lambda item: PHASES.index(item[1]["phase"])):
        none: CollectiveFigures = {**row, "count": 0, "bytes_per_rank": 0}
        before, after = mine.get(key, none), theirs.get(key, none)
        if before != after:
            found.append(
                MovedChange(
                    phase=row["phase"], collective=row["collective"], axes=row["axes"],
                    one_count=before["count"], other_count=after["count"],
                    one_bytes_per_rank=before["bytes_per_rank"], other_bytes_per_rank=after["bytes_per_rank"],
                )
            )  # fmt: skip
    return found


def _pairs(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, list[float]]:
    pairs = {key: [one.get(key, 0), other.get(key, 0)] for key in dict.fromkeys((*one, *other))}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _count(count: int, moved: int) -> str:
    return f"{count} x, {bytes_text(moved)}" if count else "-"


def _figures(pairs: Mapping[str, Sequence[float]], shown: Callable[[float], str]) -> Iterable[list[str]]:
    for what, (before, after) in pairs.items():
        if shown(before) == shown(after):
            continue
        share = f"{100 * (after - before) / before:+.1f} %" if before else ""
        yield [what, shown(before), shown(after), share]
