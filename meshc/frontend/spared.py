"""What a compilation is spared: work of torch's and Python's that nobody asks the result of, a tenth to a fifth of its time.

    guards        conditions under which Dynamo's trace of a model would hold for another call; export makes and compiles them for
                  limits that a caller sets to sizes, of which meshc sets none, and throws them away
    a fresh start export begins by forgetting all that Dynamo has compiled in this process, the user's own functions too, which would then
                  be compiled again; a trace reads none of it, but for what sizes an earlier call of the traced code had
    collections   Python looks for garbage each 700 objects, and now and then among all that the process has imported; a compilation makes
                  some hundred thousand objects, and nearly all of them stay to its end

As before when it is over, whatever happens.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
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
