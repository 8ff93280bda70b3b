"""Contexts that skip needless work of torch and Python: guards (a fifth of a compilation), lookups, code texts, collections, page faults.

    guards        conditions under which Dynamo's trace of a model would hold for another call; export builds and compiles them for
                  limits that a caller sets to sizes, of which meshc sets none, and discards them
    lookups       whose results are not used, for which Dynamo reads or imports much: the function of each line (for logs; it
                  parses whole files), all its backends, Inductor, DTensor's experiments
    texts         Python code of each intermediate graph, which torch writes and compiles so that the graph could be called
    a reset       export begins by dropping all that Dynamo has compiled in this process, the user's own functions too, which would then
                  be compiled again; a trace reads none of it, except for the sizes in an earlier call of the traced code
    collections   Python collects garbage each 700 objects, and now and then among all that the process has imported; a compilation creates
                  some hundred thousand objects, and nearly all of them live to its end
    page faults   CPython keeps frames in chunks of 16 KiB; where a loop's calls cross the end of one, each call maps a chunk and unmaps it,
                  which depends on how deep the caller's own stack is (3.11 and later)

Each context restores torch's and Python's own behaviour at its end.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, Final, TypeVar, cast

from meshc.replacements import replace_targets

Result = TypeVar("Result")
Given = TypeVar("Given")

OBJECTS = 500_000
"""New objects before a garbage collection: some 100 MB of a graph's."""
FRAME_WORDS: Final = 70_000
"""Words of a frame for which CPython maps a chunk of 1 MiB: the rest of it, 460 KiB, has some thousand frames."""


def without_guards() -> AbstractContextManager[None]:
    """A context for one trace without dynamic sizes, in which export builds no guards."""
    return replace_targets(export_guards=_nothing)


def without_lookups() -> AbstractContextManager[None]:
    """A context for one trace without those lookups, and without a reset: the trace sees no sizes of other calls, and what the process has
    compiled stays compiled. Other lookups are answered as ever, except for names of functions in torch's logs."""
    from meshc.private import LocalMapWrappedHigherOrderVariable, graph_region_tracker

    made, wraps = graph_region_tracker.InputPickler, LocalMapWrappedHigherOrderVariable.should_wrap_in_hop

    def wraps_if_any(value: object) -> bool:
        return LOCAL_MAP in sys.modules and wraps(value)

    return replace_targets(
        function_names=_nothing,
        backend_lookup=_nothing,  # a backend is only compared with a compiled function's, under torch.func
        input_pickler=partial(_LazyObject, made),
        local_map_check=wraps_if_any,
        dynamo_reset=_nothing,
        size_profile=None,
        initial_size_profile=None,
    )


def with_lazy_code() -> AbstractContextManager[None]:
    """A context for one trace, in which the code of a graph is written when it is first called or read."""
    from meshc.private import lazy_graph_modules

    return lazy_graph_modules(True)


LOCAL_MAP = "torch.distributed.tensor.experimental._func_map"
"""The module of `local_map`'s results."""


class _LazyObject:
    """An object that is created at the first access to an attribute."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if name == "_one":
            self._one = self._made()
            return self._one
        return getattr(self._one, name)


def _nothing(*args: object, **kwargs: object) -> None:
    pass


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """A context for one compilation with rarer garbage collections. A user's higher threshold, or none, is kept."""
    young, *older = gc.get_threshold()
    if not 0 < young < OBJECTS:
        yield
        return
    gc.set_threshold(OBJECTS, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def _call(function: Callable[[Given], Result], given: Given) -> Result:
    return function(given)


_call_in_large_frame: Final = FunctionType(_call.__code__.replace(co_stacksize=FRAME_WORDS), globals())


def call_in_large_frame(function: Callable[[Given], Result], given: Given) -> Result:
    """`function(given)`, with room for its frames in one chunk."""
    return cast(Result, _call_in_large_frame(function, given))


def collect_garbage() -> None:
    """Collect garbage after a compilation that leaves much of it (graphs have reference cycles) to later ones. Does nothing if the user has
    disabled collection."""
    if gc.isenabled():
        gc.collect(1)
