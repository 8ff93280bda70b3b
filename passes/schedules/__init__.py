"""The pipeline schedules, one file each; `names()` lists them, `get(name)` finds one. `docs/add-a-schedule.md` shows how to add one.

Every module of this folder that has a `SCHEDULE` is found; there is no list to keep.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from functools import cache

from meshc.errors import ScheduleError
from meshc.passes.schedules.kind import Kind, Lists
from meshc.pipelining.schedule import Action, Link, Schedule, chain, connect, parse
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
    wanted: str | Kind | Lists | Schedule,
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    links: Collection[Link] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """A schedule with its messages, for `check` to look at. ScheduleError: there is no such schedule, or it does not suit the numbers.

    wanted  a name, a text (it has a colon), a `Kind`, a function like those of kinds, or a schedule
    stages  of the model; if not given, what a kind wants, and one a rank for a function
    links   what stages give each other; a plain chain if not given
    """
    if isinstance(wanted, str) and ":" in wanted:
        wanted = parse(wanted, links)
    if isinstance(wanted, Schedule):
        if wanted.ranks != ranks:
            raise ScheduleError(f"{wanted.name or 'the schedule'} has lists for {wanted.ranks} ranks; the pipeline has {ranks}")
        return wanted
    if isinstance(wanted, (str, Kind)):
        kind = get(wanted) if isinstance(wanted, str) else wanted
        stages = kind.stages(ranks) if stages is None else stages
        kind.refuse(ranks, stages, microbatches)
        function, name = kind.lists, kind.name
    else:
        stages = ranks if stages is None else stages
        function, name = wanted, getattr(wanted, "__name__", "the schedule")
    lists = [list(actions) for actions in function(ranks, stages, microbatches, costs)]
    if len(lists) != ranks:
        raise ScheduleError(f"{name} made lists for {len(lists)} ranks; the pipeline has {ranks}")
    for rank, position, item in ((r, p, item) for r, actions in enumerate(lists) for p, item in enumerate(actions)):
        if not isinstance(item, Action):
            raise ScheduleError(f"{name}: rank {rank}, position {position} is {item!r}, no Action; messages are put in afterwards")
    return connect(lists, chain(stages) if links is None else links, name)
