"""Mutual exclusion of threads that use meshc: a second thread gets a StateError instead of waiting.

    main thread     call ────────────────────────────>      takes the turn, gives it back
    another              call: StateError                   would mix its messages with the other's, in an order of its own on each rank

To wait would be no better: which thread comes first is another on each rank, and ranks would run different calls together. What the
holder does inside (a program in a hook of another, a compilation in a call) is the same turn. Backward takes one of its own, on CUDA in
autograd's thread, when the call has given its back. Threads that take turns by a lock of the caller's are not in each other's way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from meshc.errors import StateError


class ThreadTurn:
    """A reentrant lock that raises StateError instead of waiting: `with turn.hold(what)`, or `take` and `give`. `refused` is called with
    the error before it is raised."""

    def __init__(self, refused: Callable[[StateError], None] | None = None) -> None:
        self._lock = threading.RLock()
        self._refused = refused
        self._holder: tuple[int | None, str] = (None, "")

    def take(self, what: str) -> None:
        if not self._lock.acquire(blocking=False):
            error = self._refusal(what)
            if self._refused is not None:
                self._refused(error)
            raise error
        self._holder = threading.get_ident(), what

    def give(self) -> None:
        self._lock.release()

    def hold(self, what: str) -> _TurnHolder:
        return _TurnHolder(self, what)

    def _refusal(self, what: str) -> StateError:
        holder, doing = self._holder
        name = next((thread.name for thread in threading.enumerate() if thread.ident == holder), "another thread")
        return StateError(
            f"two threads use meshc at once: {name} is in {doing}, and {threading.current_thread().name} came to {what}\n"
            "  why: ranks send and receive in one order, and a program works in buffers of its own\n"
            "  what to do: call programs from one thread; or put a lock around every call, taken in the same order on all ranks"
        )


class _TurnHolder:
    __slots__ = ("_turn", "_what")

    def __init__(self, turn: ThreadTurn, what: str) -> None:
        self._turn, self._what = turn, what

    def __enter__(self) -> None:
        self._turn.take(self._what)

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        self._turn.give()
