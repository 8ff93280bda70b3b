"""Keys: text names of the values that enter a graph, leave it, or pass between two. `parameter:up_proj.weight`, `flow:mm_3`.

A key is `kind:name`. Programs, artifacts, schedules and saved states hold it as it is. Only this file builds and parses keys.
"""

from __future__ import annotations

from typing import Final, Literal, NewType, get_args

PortKind = Literal[
    "parameter", "buffer", "input", "constant", "state", "number", "random", "tangent", "saved", "output", "gradient", "metric"
]
"""Kinds of values that enter or leave a program."""

Between = Literal["flow", "value", "gathered", "early", "part", "sum", "rows", "joined"]
"""Kinds of values between two stages: `flow` of one microbatch, `value` and `gathered` for all of them, `early` a collective in flight; the
others are parts and wholes of accumulations (`meshc/program/accumulate.py`)."""

AccumulationKind = NewType("AccumulationKind", str)
"""Likewise the kind of a reduction's parts or wholes, which its record has (`meshc/ir/reductions.py`)."""

Kind = PortKind | Between | AccumulationKind

KINDS: Final[tuple[str, ...]] = get_args(PortKind)


def key_of(kind: Kind, name: str) -> str:
    return f"{kind}:{name}"


def kind_of(key: str) -> str:
    return key.partition(":")[0]


def name_of(key: str) -> str:
    return key.partition(":")[2]


def is_a(key: str, *kinds: Kind) -> bool:
    """Whether `key` is of one of these kinds; False for a text that is no key."""
    kind, colon, _ = key.partition(":")
    return bool(colon) and kind in kinds
