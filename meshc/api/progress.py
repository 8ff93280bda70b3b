"""Progress line of a long compilation on a terminal, erased when the compilation is over.

    |  meshc compiles TrainStep(GPT): differentiate  12 s        (capture 4.1 s)
    |  meshc compiles TrainStep(GPT): a plan within 200 kB, linear program 3  31 s        (factorize 0.2 s)

It is there from a compilation's third second on, on rank 0 alone, and where its errors go to a terminal: nothing is written to a file, a
pipe or a notebook, nor where MESHC_LOG says what passes take. A pass is named as soon as the one before it has ended.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from meshc import environment
from meshc.lazy_module import LazyModule
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook, report_progress_to

if TYPE_CHECKING:
    from meshc.passes import pipeline
else:
    pipeline = LazyModule("meshc.passes.pipeline")

AFTER_S: Final = 2.0
"""A compilation that is over before is no long one."""
_TIMES_A_SECOND: Final = 4
FIRST: Final = "capture"
"""What it is at until a pass has ended; a program that is taken from disk needs no passes."""


@contextlib.contextmanager
def show_progress(what: str, hook: Hook | None, wanted: bool = True) -> Iterator[Hook | None]:
    """A context that shows progress of the compilation of `what`. Yields the hook to pass to it: `hook`, then an update of the line."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty() or environment.log_level():
        yield hook
        return
    line = _ProgressLine(what)

    def report_pass(name: str, phase: CompilationPhase) -> None:
        if hook is not None:
            hook(name, phase)
        line.at(name, phase.seconds.get(name, 0.0))

    try:
        with report_progress_to(line.doing):
            yield report_pass
    finally:
        line.end()


class _ProgressLine:
    def __init__(self, what: str) -> None:
        self._what, self._at, self._before = what, FIRST, ""
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._live: Any = None
        self._timer: threading.Timer | None = threading.Timer(AFTER_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def at(self, done: str, seconds: float) -> None:
        """A pass has ended."""
        behind = dict(zip(pipeline.NAMES, pipeline.NAMES[1:], strict=False))
        self._at, self._before = behind.get(done, done), f"({done} {seconds:.1f} s)"

    def doing(self, what: str) -> None:
        self._at = what

    def end(self) -> None:
        with self._lock:
            timer, live = self._timer, self._live
            self._timer = self._live = None
        if timer is not None:
            timer.cancel()
        if live is not None:
            live.stop()

    def _begin(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        console, spinner = Console(file=sys.stderr), Spinner("line")

        def now() -> Spinner:
            spinner.update(text=f"meshc compiles {self._what}: {self._at}  {time.monotonic() - self._began:.0f} s  {self._before}")
            return spinner

        with self._lock:
            if self._timer is None or not console.is_terminal or console.is_dumb_terminal:
                return
            # what others print is not taken from them: a model that is being traced may look at sys.stdout
            self._live = Live(
                console=console, get_renderable=now, refresh_per_second=_TIMES_A_SECOND, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()
