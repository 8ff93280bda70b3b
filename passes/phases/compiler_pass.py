"""A pass: its function from a phase to itself or the next, name, condition, and reason of its place; progress reports of long passes.

A pass owns the phase that it is given: it may write into the graphs in it, and only its result is used afterwards. A caller that keeps a
phase copies it first. Nothing writes into the result of the last pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from meshc.passes.phases.compilation_phase import CompilationPhase

Given = TypeVar("Given", bound=CompilationPhase)
Left = TypeVar("Left", bound=CompilationPhase)


@dataclass(frozen=True)
class Pass(Generic[Given, Left]):
    """
    why   given where the place in the order is not obvious
    when  whether the pass has anything to do; a phase that it leaves out passes as it is, and the pass is not imported
    """

    name: str
    run: Callable[[Given], Left]
    why: str = ""
    when: Callable[[Given], bool] | None = None


Hook = Callable[[str, CompilationPhase], None]
"""Called as hook(name of a pass, the phase that it returned)."""

_ONLOOKER: Final[ContextVar[Callable[[str], None] | None]] = ContextVar("onlooker", default=None)


@contextmanager
def report_progress_to(onlooker: Callable[[str], None]) -> Iterator[None]:
    """A context in which long passes report their progress to `onlooker`."""
    before = _ONLOOKER.set(onlooker)
    try:
        yield
    finally:
        _ONLOOKER.reset(before)


def report_progress(what: str) -> None:
    if (onlooker := _ONLOOKER.get()) is not None:
        onlooker(what)
