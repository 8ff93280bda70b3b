"""Pass runner: each pass is timed, its graphs are verified, and its result is shown to the hook."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar, cast

from meshc.frontend.faults import phase as part
from meshc.frontend.inner_transforms import restore_levels
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook, Pass
from meshc.passes.structure_check import StructureCheck

Given = TypeVar("Given", bound=CompilationPhase)
Left = TypeVar("Left", bound=CompilationPhase)


def run_pass(each: Pass[Given, Left], phase: Given, hook: Hook | None = None) -> Left:
    return _run_verified(each, phase, hook, StructureCheck(phase))


def _run_verified(each: Pass[Given, Left], phase: Given, hook: Hook | None, structure: StructureCheck) -> Left:
    start = time.process_time()
    with part(f"the pass {each.name}"), restore_levels():
        if each.when is not None and not each.when(phase):
            left = cast(Left, phase)
        else:
            left = each.run(phase)
        seconds = time.process_time() - start
        structure.verify(left)
    left = replace(left, seconds={**left.seconds, each.name: seconds})
    if hook is not None:
        hook(each.name, left)
    return left


def run_passes(passes: Iterable[Pass[Left, Left]], phase: Left, hook: Hook | None = None) -> Left:
    last: StructureCheck | None = None
    for each in passes:
        last = StructureCheck(phase, last)
        phase = _run_verified(each, phase, hook, last)
    return phase
