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
"""Of a mesh; each position has a number in a table."""
MOST_SIZE: Final = 1 << 62
"""Of any number in an expression of sizes."""
MOST_NODES: Final = 500
"""Of an expression of sizes as Python reads it."""
MOST_TERMS: Final = 1 << 10
"""Of a product or power of sums of sizes, multiplied out."""
MOST_ROUNDINGS: Final = 24
"""(//, %, max, min) in an expression of sizes; a deep stack of strided convolutions has one a layer."""
MOST_ROUNDINGS_MULTIPLIED: Final = 4
"""In a product of sizes: a tile's number of elements has one for each open dim that is split."""
MOST_RUNS: Final = 1 << 16
"""Instructions of a schedule without a pipeline: microbatches, times what each does."""
MOST_STAGES: Final = 1 << 16
MOST_ACTIONS: Final = 1 << 20
"""Of a pipeline's schedule, on all ranks."""
MOST_DRAWN: Final = 1 << 16
"""Rows of a picture, one a rank."""
MOST_EVENTS: Final = 1 << 19
"""Of a trace that is drawn."""
MOST_TEXT: Final = 1 << 28
"""Bytes of a file that is read as text."""
MOST_PLAN: Final = 1 << 18
"""Characters of a plan."""
MOST_PLAN_MARKUP: Final = 1 << 16
"""Of a plan in YAML or TOML, whose readers take seconds for more."""
MOST_PLAN_LINES: Final = 1 << 12
MOST_PLAN_LINE: Final = 1 << 12
"""Characters of one line of a plan."""
MOST_PINS: Final = 64
"""About one tensor: each is held against each."""
MOST_ITEMS: Final = 4_000_000
"""Of JSON: values in its lists and objects, for each of which Python keeps some sixty bytes."""
MOST_SECONDS: Final = 1e9
"""Of a time in a trace, either side of its beginning."""


def read_text(path: str | os.PathLike[str], most: int = MOST_TEXT) -> str:
    """A text file. Raises ArtifactError for one that cannot be read, is no UTF-8, or has more bytes than any that meshc writes.

    What a device or a pipe gives has no size before it is read, and may have no end.
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
    """What JSON holds, without NaN, infinities and keys that are there twice. Raises ArtifactError; `where` names the text."""
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
    """An integer within bounds. Raises ArtifactError, saying `what` it is meant to be."""
    if type(value) is not int or not low <= value <= high:
        raise ArtifactError(f"{what} is {shown(value)}, and must be an integer from {low} to {high}")
    return value


def number(value: object, what: str, low: float, high: float) -> float:
    """A number within bounds; NaN is in none. Raises ArtifactError."""
    if not (type(value) is int or type(value) is float) or not low <= value <= high:
        raise ArtifactError(f"{what} is {shown(value)}, and must be a number from {low:g} to {high:g}")
    return float(value)


def shown(value: object) -> str:
    """A value of any size in a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"an integer of some {int(math.log10(2) * value.bit_length())} digits"
    text = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]} ..."
