"""A compilation that an earlier start of the same job has made, and one that is kept for the next.

    Options(cache=...) ──> folder        what the compilation depends on ──> name        there: taken     not there: compiled, and put there

Rank 0 alone reads and writes: the others take its program as ever (`meshc.api.shared`). What runs is then the program that rank 0 would
have compiled, and ranks compare its hash as before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshc import environment, kept_programs
from meshc.api import job_key
from meshc.api.made import Made
from meshc.api.options import Options
from meshc.errors import ArtifactError
from meshc.frontend import output_tree_data, reachable
from meshc.frontend.output_tree_data import NoData
from meshc.frontend.reachable import Reachable
from meshc.passes.phases.request import Request


@dataclass(frozen=True)
class Ran:
    """What a trace has told of the code that it ran.

    why          why nobody else can have its program: another rank, another start; "" if they can
    environment  variables of the environment that it may have read
    """

    why: str
    environment: Mapping[str, str]


def folder(options: Options) -> Path | None:
    """Where programs are kept; None: nowhere, or the passes are to be seen at work."""
    if environment.dump_folder() is not None or environment.verifying():
        return None
    if options.cache is None:
        return environment.programs_folder()
    if isinstance(options.cache, bool):
        return kept_programs.default_folder() if options.cache else None
    return Path(options.cache)


class Entry:
    """One compilation's place in the folder."""

    def __init__(self, where: Path, mine: Reachable, agreed: Mapping[str, str], request: Request) -> None:
        self._folder, self._request, self._why = where, request, mine.why
        self._name = "" if mine.why else job_key.key(mine, agreed, request)

    def taken(self) -> tuple[Made, Ran] | None:
        """What lies there, if it is what would be compiled now."""
        began = time.process_time()
        found = kept_programs.read(self._folder, self._name) if self._name else None
        if found is None:
            return None
        told, request = found.told, self._request
        ran = Ran("", dict(told["environment"]))
        if reachable.variables_of(ran.environment) != ran.environment:
            kept_programs.drop(self._folder, self._name)  # the same place is that of the program under today's
            return None
        stages = {name: replace(stage, origin=None) for name, stage in found.program.stages.items()}  # errors name lines of the model
        mesh = request.mesh if found.program.mesh == request.mesh else found.program.mesh
        program = replace(found.program, stages=stages, mesh=mesh)
        try:
            tree = output_tree_data.read(told["tree"])
        except NoData:
            return None
        seconds = {"taken from disk": time.process_time() - began}
        return Made.of_told(program, request, tree, told, seconds), ran

    def keep(self, made: Made, ran: Ran) -> Made:
        """Put there for a next start; what cannot be has a note that says why."""
        assert made.lowered is not None
        why = self._why or ran.why
        if not why and made.lowered.backward is not None:
            why = "its backward is made anew for each set of outputs that receive gradients"
        if not why:
            try:
                why = kept_programs.write(self._folder, self._name, made.program, {"environment": dict(ran.environment), **made.told()})
            except (ArtifactError, NoData) as error:
                why = str(error)
        if not why:
            return made
        return replace(made, program=replace(made.program, notes=[*made.program.notes, kept_programs.NOT_KEPT + why]))
