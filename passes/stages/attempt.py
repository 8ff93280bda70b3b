"""Refusals as values: a search gets the error of an impossible candidate as its answer; faults of meshc itself are raised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from meshc.errors import CompileError, CompilerFault, MeshcError, PlanError, ScheduleError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Refusal:
    """The error of a candidate that is impossible."""

    error: MeshcError

    def __str__(self) -> str:
        return str(self.error).splitlines()[0]


def attempt(make: Callable[[], Made]) -> Made | Refusal:
    try:
        return make()
    except CompilerFault:
        raise
    except (CompileError, PlanError, ScheduleError) as error:
        return Refusal(error)
