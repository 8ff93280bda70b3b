"""Table of backends: from the name of a backend to the function that makes a stage executable on this rank.

    run = maker("inductor")(stage, groups, coordinates, device, here)          run(inputs, microbatch, env, done) -> outputs

Another backend is a file beside `inductor.py` and a line here. Its name is listed in `BACKENDS` of `meshc/program/program.py`, and what the
compiler does for it, which the program's text then shows, in `passes/lower/group_regions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from meshc.errors import StateError
from meshc.lazy_module import LazyModule
from meshc.runtime.run.codegen import RunStage, StageWriter

if TYPE_CHECKING:
    from meshc.runtime.run import inductor
else:
    inductor = LazyModule("meshc.runtime.run.inductor")


def generate(*stage: Any) -> RunStage:
    """A stage's function, of `StageWriter`'s arguments."""
    return StageWriter(*stage).function()


MAKERS: Final[Mapping[str, Callable[..., RunStage]]] = {"eager": generate, "inductor": lambda *stage: inductor.compile_regions(*stage)}


def maker(backend: str) -> Callable[..., RunStage]:
    """The function that makes a stage executable. Raises StateError for an unknown backend."""
    if backend not in MAKERS:
        raise StateError(f"the program is for the backend {backend!r}, which this runtime does not know")
    return MAKERS[backend]
