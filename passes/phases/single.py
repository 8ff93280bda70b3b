"""A pass: a function from a phase to itself or to the next, with its name, and the reason of its place in the order.

A pass is given its phase for good: it may write into the graphs in it, and what it returns is all that is left. Who wants to keep a phase
copies it first. Nothing writes into what the last pass has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from meshc.passes.phases.outset import Outset

Given = TypeVar("Given", bound=Outset)
Left = TypeVar("Left", bound=Outset)


@dataclass(frozen=True)
class Pass(Generic[Given, Left]):
    """`why` is said where the place is not obvious."""

    name: str
    run: Callable[[Given], Left]
    why: str = ""


Hook = Callable[[str, Outset], None]
"""Called as hook(name of a pass, the phase that it left)."""

_ONLOOKER: Final[ContextVar[Callable[[str], None] | None]] = ContextVar("onlooker", default=None)


@contextmanager
def heard_by(onlooker: Callable[[str], None]) -> Iterator[None]:
    """A context in which `onlooker` is told what a pass that takes long is at."""
    before = _ONLOOKER.set(onlooker)
    try:
        yield
    finally:
        _ONLOOKER.reset(before)


def say(what: str) -> None:
    if (onlooker := _ONLOOKER.get()) is not None:
        onlooker(what)
