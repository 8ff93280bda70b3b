"""A lazy value: computed when first requested, and then memoised."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LazyValue(Generic[Value]):
    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make

    @cached_property
    def value(self) -> Value:
        return self._make()
