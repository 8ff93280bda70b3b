"""A fast `dataclasses.replace` for frozen records that are copied by the ten thousand."""

from __future__ import annotations

from typing import Any, TypeVar

Kind = TypeVar("Kind")


def like(value: Kind, **others: Any) -> Kind:
    """`dataclasses.replace` for a record without `__post_init__` and slots, in a tenth of the time."""
    made = object.__new__(type(value))
    vars(made).update(vars(value), **others)
    return made
