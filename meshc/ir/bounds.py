"""Limits on sizes and counts read from untrusted files, and checked readers of text, JSON and numbers.

Every number that is read from a file and then used as a size, a count or an exponent has a bound here. The bounds are far above what
programs hold (the largest that were compiled: 4096 ranks, some 100,000 values) and far below what would fill memory or take for ever.
"""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

from meshc.errors import ArtifactError

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

MOST_RANKS: Final = 1 << 20
"""Ranks of a mesh; each position has a number in a table."""
MOST_SIZE: Final = 1 << 62
"""Largest number in an expression of sizes."""
MOST_NODES: Final = 500
"""Nodes of the syntax tree of an expression of sizes."""
MOST_TERMS: Final = 1 << 10
"""Terms of a product or power of sums of sizes, expanded."""
MOST_ROUNDINGS: Final = 24
"""(//, %, max, min) in an expression of sizes; a deep stack of strided convolutions has one a layer."""
MOST_ROUNDINGS_MULTIPLIED: Final = 4
"""In a product of sizes: a tile's number of elements has one for each open dim that is split."""
MOST_RUNS: Final = 1 << 16
"""Instructions of a schedule without a pipeline: microbatches, times what each does."""
MOST_STAGES: Final = 1 << 16
MOST_ACTIONS: Final = 1 << 20
"""Actions of a pipeline's schedule, on all ranks together."""
MOST_DRAWN: Final = 1 << 16
"""Rows of a picture, one a rank."""
MOST_EVENTS: Final = 1 << 19
"""Events of a trace that is drawn."""
MOST_TEXT: Final = 1 << 28
"""Bytes of a file that is read as text."""
MOST_PLAN: Final = 1 << 18
"""Characters of a plan."""
MOST_PLAN_MARKUP: Final = 1 << 16
"""Characters of a plan in YAML or TOML, whose parsers take seconds for more."""
MOST_PLAN_LINES: Final = 1 << 12
MOST_PLAN_LINE: Final = 1 << 12
"""Characters of one line of a plan."""
MOST_PINS: Final = 64
"""Pins of one tensor: they are compared pairwise."""
MOST_ITEMS: Final = 4_000_000
"""Values in the lists and objects of a JSON text, each of which takes Python some sixty bytes."""
MOST_SECONDS: Final = 1e9
"""Seconds between an event of a trace and the trace's start, either way."""


def read_text(path: str | os.PathLike[str], most: int = MOST_TEXT) -> str:
    """The text of a file. Raises ArtifactError if the file cannot be read, is no UTF-8, or has more than `most` bytes.

    The size is not taken from `stat`: devices and pipes have none, and may have no end.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            read = opened.read(most + 1)
        if len(read) > most:
            raise ArtifactError(f"{file} has {max(len(read), file.stat().st_size)} bytes or more, of which {most} may be read as text")
        return io.TextIOWrapper(io.BytesIO(read), encoding="utf-8").read()
    except (UnicodeDecodeError, OSError) as error:
        raise ArtifactError(f"{file} cannot be read as text: {error}") from None


def parse_json(text: str, where: str) -> Json:
    """The parsed JSON. Raises ArtifactError, also for NaN, infinities and duplicate keys; `where` names the text in the message."""
    items = text.count(",") + text.count("[") + text.count("{")
    if items > MOST_ITEMS:
        raise ArtifactError(f"{where} holds {items} values or so, of which {MOST_ITEMS} may be read")
    try:
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"{where} is no JSON, it was truncated or edited: {error}") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that JSON has")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} is there twice")
    return found


def integer(value: object, what: str, low: int = 0, high: int = MOST_SIZE) -> int:
    """`value`, if it is an integer from `low` to `high`. Raises ArtifactError otherwise; `what` names the value in the message."""
    if type(value) is not int or not low <= value <= high:
        raise ArtifactError(f"{what} is {brief_repr(value)}, and must be an integer from {low} to {high}")
    return value


def number(value: object, what: str, low: float, high: float) -> float:
    """`value` as a float, if it is a number from `low` to `high`. Raises ArtifactError otherwise, also for NaN."""
    if not (type(value) is int or type(value) is float) or not low <= value <= high:
        raise ArtifactError(f"{what} is {brief_repr(value)}, and must be a number from {low:g} to {high:g}")
    return float(value)


def brief_repr(value: object) -> str:
    """A short text of any value, for messages."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"an integer of some {int(math.log10(2) * value.bit_length())} digits"
    text = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]} ..."
