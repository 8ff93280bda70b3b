"""What a compilation is spared: work of torch's and Python's that nobody asks the result of, a tenth to a fifth of its time.

    guards        conditions under which Dynamo's trace of a model would hold for another call; export makes and compiles them for
                  limits that a caller sets to sizes, of which meshc sets none, and throws them away
    answers       to questions that do not come up, for which Dynamo reads or imports much: of which function each line is (for logs; it
                  takes whole files apart), all its backends, Inductor, DTensor's experiments
    texts         Python code of each graph on its way, which torch writes and compiles so that the graph could be called
    a fresh start export begins by forgetting all that Dynamo has compiled in this process, the user's own functions too, which would then
                  be compiled again; a trace reads none of it, but for what sizes an earlier call of the traced code had
    collections   Python looks for garbage each 700 objects, and now and then among all that the process has imported; a compilation makes
                  some hundred thousand objects, and nearly all of them stay to its end

As before when it is over, whatever happens.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

OBJECTS = 100_000
"""Made anew before Python looks for garbage: some 20 MB of a graph's."""


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Around one trace without open sizes."""
    from meshc.private import functional_export

    with mock.patch.object(functional_export, "_suggest_or_raise_constraint_violation", _nothing):
        yield


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Around one trace. What is asked all the same is answered as ever, but for the names of functions in torch's logs."""
    from meshc.private import LocalMapWrappedHigherOrderVariable, dynamo, graph_region_tracker, symbolic_convert

    made, wraps = graph_region_tracker.InputPickler, LocalMapWrappedHigherOrderVariable.should_wrap_in_hop

    def wraps_if_any(value: object) -> bool:
        return LOCAL_MAP in sys.modules and wraps(value)

    with (
        mock.patch.object(symbolic_convert, "get_funcname", _nothing),
        mock.patch.object(dynamo, "lookup_backend", _nothing),  # compared with what compiles, where torch.func calls what is compiled
        mock.patch.object(graph_region_tracker, "InputPickler", lambda: _Later(made)),
        mock.patch.object(LocalMapWrappedHigherOrderVariable, "should_wrap_in_hop", wraps_if_any),
    ):
        yield


@contextlib.contextmanager
def unwritten() -> Iterator[None]:
    """Around one trace: code of graphs is written when somebody calls or reads it."""
    from meshc.private import lazy_graph_modules

    with lazy_graph_modules(True):
        yield


LOCAL_MAP = "torch.distributed.tensor.experimental._func_map"
"""Where what `local_map` makes is made."""


class _Later:
    """An object that is made when it is first asked for something."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if name == "_one":
            self._one = self._made()
            return self._one
        return getattr(self._one, name)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Around one trace: it sees no sizes of other calls, and what the process has compiled stays compiled."""
    from meshc.private import dynamo, pgo

    with (
        mock.patch.object(dynamo, "reset", _nothing),
        mock.patch.object(pgo, "_CODE_STATE", None),
        mock.patch.object(pgo, "_INIT_CODE_STATE", None),
    ):
        yield


def _nothing(*args: object, **kwargs: object) -> None:
    pass


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Around one compilation. Who has set it to look more rarely, or never, keeps that."""
    young, *older = gc.get_threshold()
    if not 0 < young < OBJECTS:
        yield
        return
    gc.set_threshold(OBJECTS, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def collected() -> None:
    """Behind a compilation that leaves much which others begin with, and much garbage (graphs lie in circles): it is looked through now,
    and not in the next one's time. Who has told Python to look for none keeps that."""
    if gc.isenabled():
        gc.collect(1)
