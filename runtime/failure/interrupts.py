"""Deferral of Ctrl-C to the end of a call, so that ranks that are all interrupted stop after the same call, with complete state.

    main thread   call ...... SIGINT ...... the call ends ──> KeyboardInterrupt ──> the user's own except or finally, which may save
    watcher       a call that does not end in time, since it waits for ranks that have stopped elsewhere, is a failure like any other

If the user has installed a handler of SIGINT, before or later, that handler is called, and nothing here.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

TOLD_S: Final = 1.0
"""Seconds after a Ctrl-C from which a line says that the call is waited for."""


class Interrupts:
    """`inside`: whether the main thread is in a call. `tell` prints a line."""

    def __init__(self, inside: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self._inside, self._tell = inside, tell
        self._since: float | None = None
        self._told = False
        self._own: object = self._handle
        self._pipe: tuple[int, int] | None = None
        self._unseen: float | None = None
        """Time of a signal that Python's handler has not seen yet, since the main thread waits in a collective."""
        self._lock = threading.RLock()

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if before != -1:  # an event loop's
                signal.set_wakeup_fd(before)
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        with self._lock:
            self._came()
            self._unseen = None
        if self._inside() and self._since is None:
            self._since = time.monotonic()
            return
        self._since = None
        signal.default_int_handler(number, frame)

    def _came(self) -> bool:
        """Whether a SIGINT has arrived since the last call of this method."""
        there = self._pipe is not None and select.select([self._pipe[0]], [], [], 0)[0]
        return self._pipe is not None and bool(there) and signal.SIGINT in os.read(self._pipe[0], 4096)

    def raise_interrupt(self) -> None:
        """Called when the main thread has left a call. Raises KeyboardInterrupt if there was a Ctrl-C in the call."""
        if self._since is not None and threading.current_thread() is threading.main_thread():
            self._since = None
            raise KeyboardInterrupt

    def drop(self) -> None:
        """Forgets a Ctrl-C, since the call has raised another error."""
        self._since = None

    def overdue(self, grace_s: float) -> bool:
        """Whether a call has gone on for more than `grace_s` after a Ctrl-C; prints a line before that. Called by the watcher."""
        with self._lock:
            if self._came():
                self._unseen = time.monotonic()
        since = self._since or self._unseen
        waited = 0.0 if since is None else time.monotonic() - since
        self._told = self._told and since is not None
        if waited > TOLD_S and not self._told:
            self._told = True
            end = f"this call may end first, within {grace_s:.0f} s, so that the state can be saved"
            self._tell(f"interrupted; {end} (Ctrl-C again: at once)")
        return waited > grace_s

    def close(self) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == self._own:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.set_wakeup_fd(-1)
