"""Compilation of a few captured layers that stand for all, where their equality is proved; otherwise of the whole model.

Where layers of several kinds alternate, the first attempt captures one layer at each end, the second one of each kind.

Before `grow`, errors would name layers by their numbers among the captured ones, and an error in one layer holds for all of them: the whole
model is compiled then, and raises the error. From `grow` on, graphs are the whole model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from meshc.errors import MeshcError
from meshc.lazy_module import LazyModule
from meshc.passes.depth.prove_depth import prove, whole_note, with_depth
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.captured_depth import Depth
from meshc.passes.phases.compilation_phase import CompilationPhase, begin
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.pipeline import GROW
from meshc.passes.place.batch import WrongJoinDim

if TYPE_CHECKING:
    from meshc.passes.driver import search_errors
else:
    search_errors = LazyModule("meshc.passes.driver.search_errors")

Answer = TypeVar("Answer")


def is_depth_valid(traced: TracedModel, request: Request) -> bool:
    """Whether the layers left out of `traced` are proved equal under `request` too: for another optimizer, or other sizes."""
    if traced.depth is None:
        return True
    try:
        return any(_is_same_depth(traced.depth, prove(request, whole_ends)) for whole_ends in (False, True))
    except Unequal:
        return False


def _is_same_depth(one: Depth, other: Depth | None) -> bool:
    return other is not None and (one.stretches, one.captured) == (other.stretches, other.captured)


def run_at_depth(compiled: Callable[[CompilationPhase, Hook | None], Answer], request: Request, hook: Hook | None) -> Answer:
    """The result of `compiled` for `request`. `hook` may hear of a pass more than once; the last time is the one that counts."""
    outset = with_depth(begin(request))
    whole = False

    def report(name: str, phase: CompilationPhase) -> None:
        nonlocal whole
        whole = whole or name == GROW.name
        if hook is not None:
            hook(name, phase)

    if outset.depth is None:
        return compiled(outset, report)
    try:
        try:
            return compiled(outset, report)
        except Unequal:
            wider = with_depth(begin(request), whole_ends=True)
            if wider.depth is None or _is_same_depth(outset.depth, wider.depth):
                raise
            return compiled(wider, report)
    except Unequal as difference:
        outset = outset.with_notes(whole_note(difference))
    except (search_errors.NothingFits, WrongJoinDim):
        raise
    except MeshcError:
        if whole:
            raise
    return compiled(replace(outset, depth=None), report)
