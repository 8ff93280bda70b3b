"""Attempt: what cannot be is an answer of a search, not an exception through it. Faults of meshc itself are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from meshc.errors import CompileError, CompilerFault, MeshcError, PlanError, ScheduleError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Refused:
    """Why something cannot be."""

    error: MeshcError

    def __str__(self) -> str:
        return str(self.error).splitlines()[0]


def attempt(make: Callable[[], Made]) -> Made | Refused:
    try:
        return make()
    except CompilerFault:
        raise
    except (CompileError, PlanError, ScheduleError) as error:
        return Refused(error)
