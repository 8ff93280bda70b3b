"""What is done after each pass of a compilation, as the environment asks: a log, a dump, a check."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from meshc import environment
from meshc.errors import VerifyError
from meshc.ir import spmd
from meshc.passes.driver.dump import Hook, dumper

_dumped: Final[Counter[Path]] = Counter()
"""Compilations of this process dumped so far, by folder."""


def hook(program: Any, simulation: Any) -> Hook | None:
    """What the pass runner calls after each pass of one compilation, as the environment asks; None if it asks for nothing.

    program     what is compiled, for messages
    simulation  offers `check_after_pass(name, draft)`, which raises if the draft does not mean what the model means
    """
    wanted: list[Hook] = []
    level, folder = environment.log_level(), environment.dump_folder()
    if level:
        wanted.append(_logger(program, level))
    if folder is not None:
        wanted.append(dumper(_next_folder(folder)))
    if environment.verifying():
        wanted.append(_verifier(simulation))  # last, so that what it refuses is on disk
    if not wanted:
        return None

    def call(name: str, draft: Any) -> None:
        for one in wanted:
            one(name, draft)

    return call


def _next_folder(folder: Path) -> Path:
    """The folder itself for the first compilation of a process, `2`, `3`, ... inside it for the next ones."""
    key = folder.resolve()
    _dumped[key] += 1
    return folder if _dumped[key] == 1 else folder / str(_dumped[key])


def _verifier(simulation: Any) -> Hook:
    def verify(name: str, draft: Any) -> None:
        if draft.graph is None:
            return  # before differentiate there is no graph of operators to run
        try:
            simulation.check_after_pass(name, draft)
        except Exception as error:
            kind = "" if isinstance(error, VerifyError) else f"{type(error).__name__}: "
            raise VerifyError(f"after the pass {name} the program no longer means what the model means\n  {kind}{error}") from error

    return verify


def _logger(program: Any, level: str) -> Hook:
    told = 0

    def log(name: str, draft: Any) -> None:
        nonlocal told
        left = f", leaves {_size(draft)}" if level == "debug" else ""
        print(f"meshc: {name} {draft.seconds.get(name, 0.0):.2f} s{left}", file=sys.stderr)
        for note in draft.notes[told:]:
            print(f"meshc:   {note}", file=sys.stderr)
        told = len(draft.notes)

    return log


def _size(draft: Any) -> str:
    if draft.stages:
        nodes = [node for stage in draft.stages.values() for node in stage.graph.nodes]
        count = sum(spmd.is_collective(node.target) for node in nodes)
        return f"{len(nodes)} values a rank in {len(draft.stages)} stages, {count} collectives"
    graph = draft.graph or draft.traced.module.graph
    return f"{len(graph.nodes)} values"
