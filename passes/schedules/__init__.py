"""The pipeline schedules, one file each; `names()` lists them, `get(name)` finds one. `docs/add-a-schedule.md` shows how to add one.

Every module of this folder that has a `SCHEDULE` is found; there is no list to keep.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from functools import cache

from meshc.errors import ScheduleError
from meshc.passes.schedules.kind import Kind
from meshc.pipelining.schedule import Link, Schedule, chain, connect
from meshc.pipelining.timing import Costs


@cache
def _found() -> dict[str, Kind]:
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    kinds = [module.SCHEDULE for module in modules if hasattr(module, "SCHEDULE")]
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.name)}


def names() -> tuple[str, ...]:
    """The names of all schedules, sorted."""
    return tuple(_found())


def get(name: str) -> Kind:
    """The schedule of a name. ScheduleError: there is none."""
    if name not in _found():
        raise ScheduleError(f"there is no schedule {name!r}: use one of {', '.join(names())}, or write one (docs/add-a-schedule.md)")
    return _found()[name]


def build(
    kind: Kind | str,
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    links: Collection[Link] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """A schedule with its messages, ready for `check`.

    stages  of the model; what the kind wants if not given
    links   what stages give each other; a plain chain if not given
    """
    kind = get(kind) if isinstance(kind, str) else kind
    stages = kind.stages(ranks) if stages is None else stages
    kind.refuse(ranks, stages, microbatches)
    return connect(kind.lists(ranks, stages, microbatches, costs), chain(stages) if links is None else links, kind.name)
