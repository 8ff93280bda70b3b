"""A fast `dataclasses.replace` for frozen records that are copied by the ten thousand."""

from __future__ import annotations

from typing import Any, TypeVar

Kind = TypeVar("Kind")


def like(value: Kind, **others: Any) -> Kind:
    """What `dataclasses.replace` makes of a record whose making computes nothing (no `__post_init__`, no slots), in a tenth of its time."""
    made = object.__new__(type(value))
    vars(made).update(vars(value), **others)
    return made
