"""The pipeline schedules, one file each; `names()` lists them, `get(name)` finds one. `docs/add-a-schedule.md` shows how to add one.

Every module of this folder with a `SCHEDULE` is found; there is no list to maintain.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from functools import cache

from meshc.errors import ScheduleError
from meshc.passes.phases.schedule_kind import Lists, ScheduleKind
from meshc.pipelining.schedule import Action, Schedule, StageLink, chain, connect, parse
from meshc.pipelining.timing import Costs


@cache
def _kinds_by_name() -> dict[str, ScheduleKind]:
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    kinds = [module.SCHEDULE for module in modules if hasattr(module, "SCHEDULE")]
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.name)}


def names() -> tuple[str, ...]:
    """The names of all schedules, sorted."""
    return tuple(_kinds_by_name())


def get(name: str) -> ScheduleKind:
    """The schedule `name`. Raises ScheduleError if there is none."""
    if name not in _kinds_by_name():
        raise ScheduleError(f"there is no schedule {name!r}: use one of {', '.join(names())}, or write one (docs/add-a-schedule.md)")
    return _kinds_by_name()[name]


def build(
    wanted: str | ScheduleKind | Lists | Schedule,
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    links: Collection[StageLink] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """A schedule with its messages, not checked yet (`check`). Raises ScheduleError if there is no such schedule, or it does not suit the
    numbers.

    wanted  a name, a text (with a colon), a `ScheduleKind`, a function like those of kinds, or a schedule
    stages  of the model; by default the kind's number, or one a rank for a function
    links   messages between stages; by default a plain chain
    """
    if isinstance(wanted, str) and ":" in wanted:
        wanted = parse(wanted, links)
    if isinstance(wanted, Schedule):
        if wanted.ranks != ranks:
            raise ScheduleError(f"{wanted.name or 'the schedule'} has lists for {wanted.ranks} ranks; the pipeline has {ranks}")
        return wanted
    if isinstance(wanted, (str, ScheduleKind)):
        kind = get(wanted) if isinstance(wanted, str) else wanted
        stages = kind.stages(ranks) if stages is None else stages
        kind.refuse(ranks, stages, microbatches)
    else:
        kind = of_function(wanted, stages_per_rank=None)
        stages = ranks if stages is None else stages
    return connect(kind.lists(ranks, stages, microbatches, costs), chain(stages) if links is None else links, kind.name)


def of_function(function: Lists, *, stages_per_rank: int | None, trains: bool = True) -> ScheduleKind:
    """A user's function as a schedule; its result is checked at each call. The function is called with costs and without, and must return
    the same lists for the same numbers on every rank."""
    name = getattr(function, "__name__", "") or type(function).__name__

    def lists(ranks: int, stages: int, microbatches: int, costs: Costs | None) -> list[list[Action]]:
        asked = f"{name}(ranks={ranks}, stages={stages}, microbatches={microbatches}, costs)"
        try:
            made = [list(actions) for actions in function(ranks, stages, microbatches, costs)]
        except ScheduleError:
            raise
        except Exception as error:  # the user's code
            raise ScheduleError(
                f"{asked} raised {type(error).__name__}: {error}\n  what to do: return a list of Actions for each rank "
                "(docs/add-a-schedule.md); a ScheduleError says that the numbers do not suit"
            ) from error
        if len(made) != ranks:
            raise ScheduleError(f"{asked} made lists for {len(made)} rank{'s' * (len(made) != 1)}; the pipeline has {ranks}")
        for rank, position, item in ((r, p, item) for r, actions in enumerate(made) for p, item in enumerate(actions)):
            if not isinstance(item, Action):
                raise ScheduleError(
                    f"{asked}: rank {rank}, position {position} is {item!r}, no Action; messages are put in afterwards\n"
                    "  what to do: return Action(op, stage, microbatch) (meshc.pipelining.schedule), or what `number_microbatches` makes"
                )
        missing = sorted(set(range(stages)) - {item.stage for actions in made for item in actions})
        if missing:
            raise ScheduleError(f"{asked}: no rank runs stage {missing[0]}")
        return made

    return ScheduleKind(name, lists, source="the user's own function", stages_per_rank=stages_per_rank, trains=trains)
