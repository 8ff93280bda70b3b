"""Failure board: stops all ranks when one fails, with an error on each that names the first failed rank and its step.

    rank 3 raises ──> posts {rank, step, instruction, message} in the store, closes its connections
    rank 3 dies   ──> the kernel tells its neighbours on the machine at once, connections that break tell the others; they post for it
    rank 3 stops  ──> its silence is named in a warning after SILENT_S, and posted after SILENT_END_S
                                  │
    other ranks   <── the post is read once a second; waits are interrupted; `guard` raises PeerError with the post's text
                                  │
    a main thread that has not had it GRACE_S later, wherever it is  ──> its process is ended

A rank takes part from its first line of meshc on (`announce`), and until it has ended its program or destroyed its process group. A rank
that is merely late, since it evaluates or saves or has no more data, is named by the ranks that wait for it, and never ended.

An error that all ranks have raised together (`MeshcError.everywhere`, see `agreement/compare.py`) is no failure: no rank waits for another.

`watch.py` has the threads that post, read and interrupt; this file has the interface of the main thread.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshc import environment
from meshc.errors import MeshcError, PeerError, RanksDifferError, StateError
from meshc.runtime.failure.peers import ENDED, KNOWS, Failure, Peer
from meshc.runtime.failure.thread_turn import ThreadTurn
from meshc.runtime.failure.watch import BEAT_S, HAS_ENDED, Watch

Phase = TypeVar("Phase")

VERDICT_S: Final = 6.0
"""Seconds that a rank waits, after a broken connection, for a rank that knows the cause."""
SILENT_AND_BROKEN_S: Final = 3.5
"""Seconds of silence after which, once a connection broke, a rank counts as dead: a process that is merely stopped keeps connections."""
FAREWELL_S: Final = 3.0
"""Seconds that the rank which serves the store stays at most, for the others to read its failure ..."""
PATIENCE_S: Final = 10.0
"""... and to read that it has ended without a failure: another rank may be stopped just now."""
SETTLED_S: Final = 2.0
"""Seconds that a rank waits at most for the others' numbers, at its end and before it returns its state."""
SETTLE_S: Final = 0.1
"""The time that gloo's threads get at exit."""

_CONNECTION: Final = re.compile(r"gloo|pair closure|NCCL|onnection (closed|reset|refused)|Broken pipe|timed out|abort", re.IGNORECASE)


class _Status:
    """Ends the process with status 1 when it is deleted: put into `sys`, it is deleted after all exit handlers, where the exit status
    cannot be set in another way."""

    def __del__(self, end: Callable[[int], object] = os._exit) -> None:
        end(1)


class FailureBoard(Watch):
    """Posts this rank's failure to the other ranks, and raises theirs here. Constructed like a `Watch`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, groups: Sequence[ProcessGroup] = ()) -> None:
        super().__init__(store, rank, world_size, groups)
        self.turn = ThreadTurn(self.fail)  # which of its threads comes first is another on each rank: all must stop
        if not self._closed:
            atexit.register(self._at_exit)
            self._hook: object = self._uncaught  # one object, so that `close` knows it again
            self._hook_before, sys.excepthook = sys.excepthook, self._hook

    def guard(self, step: int | None, instruction: str) -> _FailureGuard:
        """A context in which a failure on either side reaches the other: an exception inside is posted and raised on; a connection that
        broke because another rank failed becomes PeerError. Entering raises PeerError if a rank is known to have failed."""
        return _FailureGuard(self, step, instruction)

    @property
    def store(self) -> dist.Store:
        """The main thread's own connection to the store. Raises PeerError if a rank is known to have failed before there is one."""
        began = time.monotonic()
        while self._talk is None:
            self.check()
            time.sleep(0.005)
            if time.monotonic() > began + BEAT_S and self._line_lost_at is None:
                self._try_store()  # a connection that is being made to a server that has gone takes minutes to fail
                began = time.monotonic()
        return self._talk

    def refuse_fork(self) -> None:
        """Raises StateError in a process that this one has forked: it has neither the threads that follow the other ranks, nor connections
        to them of its own."""
        if not self._closed and os.getpid() != self._process_id:
            raise StateError(
                f"this process ({os.getpid()}) was forked from the one that has the program ({self._process_id}), as a worker of a\n"
                "  DataLoader is, and cannot run it: its connections to the other ranks are that process's\n"
                "  what to do: call the program in the loop itself, on what the loader gives; or DataLoader(..., num_workers=0)"
            )

    def refuse_gone(self, rank: int, came: Callable[[], bool]) -> None:
        """Raises PeerError if `rank`, for which this one waits, has ended its program or destroyed its process group, unless `came()`."""
        beat = self._beat(rank)
        if beat is not None and beat["left"] is not None and not came():
            self._declare(self.departure_failure(rank))
            self.check()

    def ahead(self) -> int | None:
        """A rank that runs a call which this one has not begun, as of its last beat; None if there is none."""
        if self._closed:
            return None
        return next((rank for rank, peer in self._peers.items() if peer.beat is not None and peer.beat["began"] > self.began), None)

    @property
    def has_failure(self) -> bool:
        """Whether a rank is known to have failed, this one or another."""
        return self._failure is not None

    def check(self) -> None:
        """Raises PeerError if a rank is known to have failed. Looks at memory only."""
        if self._failure is not None:
            raise self._peer_error(self._failure)

    def _peer_error(self, failure: Failure) -> PeerError:
        self._told = True
        return RanksDifferError(str(failure)) if failure.differ else PeerError(str(failure))

    def fail(self, exception: BaseException) -> None:
        """Posts this rank's failure, unless another was first, and interrupts its communication, so that waits of other ranks end."""
        if self._closed or self._closing:
            return
        text = f"{type(exception).__name__}: {exception}".removesuffix(": ")  # KeyboardInterrupt says no more
        self._told = True
        self._declare(Failure(self.rank, self.step, self.instruction, text))
        self._interrupt()

    def settle(self, seconds: float) -> None:
        """Waits until the numbers of all this rank's steps so far have been compared with the peers', so many seconds at most: ranks may
        be about to do something else than this one. Raises PeerError if they differ, or a rank is known to have failed."""
        counts = {} if self._closed else self.numbers.to_say()
        deadline = time.monotonic() + seconds
        while counts and self._failure is None and time.monotonic() < deadline:
            self._refresh(BEAT_S)
            if self.numbers.has_compared((rank for rank, peer in self._peers.items() if not (peer.said_goodbye or peer.exited)), counts):
                break
            time.sleep(0.02)
        self.check()

    def close(self) -> None:
        """Announces that this rank leaves: from here on the others expect no beats of it. Called at exit, if not before. Final: a process
        has one board, however many programs it runs."""
        if self._closed or self._closing or os.getpid() != self._process_id:
            return
        if sys.excepthook is self._hook:
            sys.excepthook = self._hook_before
        self.interrupts.close()
        uncaught = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
        if uncaught is not None and self._failure is None:
            self.fail(uncaught)
        elif self._failure is None:
            self._settle_at_the_end()
        in_peace = self._failure is None
        self._left = HAS_ENDED if in_peace else None
        self._closing = True
        assert self._page is not None
        self._page.mark(ENDED if in_peace else KNOWS)
        self._refresh(BEAT_S)
        if self._rank_0_serves and self.rank == 0:
            deadline = time.monotonic() + (PATIENCE_S if in_peace else FAREWELL_S)
            while time.monotonic() < deadline and not all(self._needs_nothing(peer) for peer in self._peers.values()):
                self._refresh(0.1)
                time.sleep(0.02)
        self._closed = True
        self._wake_reporter.set()
        self._neighbours.wake()
        for thread in self._threads:
            thread.join(2 * BEAT_S)

    def _settle_at_the_end(self) -> None:
        """Compares the last numbers, so that a run that ends before the next beat reports a difference too, by its exit status."""
        try:
            self.settle(SETTLED_S)
        except PeerError as error:
            if self._failure is not None and self._failure.differ:
                print(f"meshc, rank {self.rank}: {error}", file=sys.stderr, flush=True)
                vars(sys)["meshc's last word"] = _Status()

    def _uncaught(self, kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
        """An exception that leaves the program: posted now, since the interpreter may wait for threads before it ends."""
        if self._failure is None and os.getpid() == self._process_id and not hasattr(sys, "ps1"):
            self.fail(exception)
        self._hook_before(kind, exception, trace)

    def _at_exit(self) -> None:
        self.close()
        deadline = time.monotonic() + PATIENCE_S
        for thread in self._threads:  # one that is in the store, whose server has gone, would abort the process likewise when it comes back
            thread.join(max(0.0, deadline - time.monotonic()))
        # gloo's worker threads let go of a finished collective's tensors a little late, need the interpreter's lock for it, and abort
        # the process ("terminate called without an active exception") if they ask for it once the interpreter has begun to end.
        time.sleep(SETTLE_S)

    def _explain(self, exception: BaseException) -> Failure | None:
        """The other rank's failure behind an exception of this one; None if the exception is this rank's own, which is then posted."""
        if self._closed:
            return None
        if not _is_connection_error(exception):
            self.fail(exception)
            return None
        if self._failure is not None:
            return self._failure
        deadline = time.monotonic() + VERDICT_S
        goodbye_at: float | None = None
        while self._failure is None and time.monotonic() < deadline:
            self._refresh(BEAT_S)
            now = time.monotonic()
            gone = next((rank for rank, peer in self._peers.items() if peer.said_goodbye or peer.exited), None)
            quiet = now - SILENT_AND_BROKEN_S
            silent = next((rank for rank, peer in self._peers.items() if peer.beat is not None and peer.changed_at < quiet), None)
            if gone is not None:
                goodbye_at = goodbye_at or now
                if now > goodbye_at + BEAT_S:
                    self._declare(self.departure_failure(gone))
            elif silent is not None and now < self._line_good_at + BEAT_S:
                self._declare_dead(silent)
            time.sleep(0.05)
        if self._failure is None:
            message = f"a connection broke, and no rank says why within {VERDICT_S:.0f} s: {exception}"
            self._declare(Failure(self.rank, self.step, self.instruction, message))
        return self._failure

    def _needs_nothing(self, peer: Peer) -> bool:
        """Whether a peer has read this rank's last post, or never will."""
        return peer.exited or peer.beat is None or peer.said_goodbye or peer.beat["knows"] or 0 in peer.beat["gone"]


class _FailureGuard:
    __slots__ = ("_before", "_board", "_instruction", "_step")

    def __init__(self, board: FailureBoard, step: int | None, instruction: str) -> None:
        self._board = board
        self._step = step
        self._instruction = instruction

    def __enter__(self) -> None:
        board = self._board
        board.refuse_fork()
        board.check()
        board.turn.take(self._instruction)
        self._before = (board.step, board.instruction)
        board._be_at(self._step, self._instruction)
        board._inside += 1

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        board = self._board
        try:
            if exception is None:
                if board._interrupted:
                    board.check()  # on CUDA an interrupted collective ends without an exception, and without a result
            elif not isinstance(exception, PeerError) and not (isinstance(exception, MeshcError) and exception.everywhere):
                failure = board._explain(exception)
                if failure is not None:
                    raise board._peer_error(failure) from exception
        finally:
            board._inside -= 1
            board._be_at(*self._before)
            board.turn.give()
            if exception is not None:
                board.interrupts.drop()
        if not board._inside:
            board.interrupts.raise_interrupt()


_BOARDS: Final[dict[ProcessGroup, FailureBoard]] = {}


def world_board() -> FailureBoard:
    """The one board of the default process group, created at the first call."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    if world not in _BOARDS:
        store = dist.PrefixStore(place_of_this_start(), world.get_group_store())
        _BOARDS[world] = FailureBoard(store, dist.get_rank(), dist.get_world_size(), [world])
    return _BOARDS[world]


def announce() -> FailureBoard | None:
    """The board of this run; called first in every entry point, so that other ranks learn of this one's end. None with a single rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    return world_board()


def check_after_passes(board: FailureBoard | None, hook: Callable[[str, Phase], None] | None) -> Callable[[str, Phase], None] | None:
    """A hook for after each pass that also checks for failures of other ranks, since a compilation may take long; calls `hook`."""
    if board is None:
        return hook

    def call(name: str, phase: Phase) -> None:
        board.check()
        if hook is not None:
            hook(name, phase)

    return call


def current_board() -> FailureBoard | None:
    """The board of the default process group, if `announce` has created one."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if world is None else _BOARDS.get(world)


def single_thread_context(what: str) -> AbstractContextManager[None]:
    """A context in which one thread of this process may send; another thread that enters meanwhile gets a StateError."""
    board = current_board()
    return nullcontext() if board is None else board.turn.hold(what)


def _is_connection_error(exception: BaseException) -> bool:
    return isinstance(exception, dist.DistNetworkError | dist.DistStoreError) or (
        isinstance(exception, RuntimeError) and _CONNECTION.search(str(exception)) is not None
    )


# Store prefix of one start of a job, so that restarts by `torchrun --max-restarts` do not read an earlier start's keys.
#
# torchrun's agents keep the store of a start for the next one, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start its own. What
# ranks of an earlier start wrote is still in it then: that a rank died, what they agreed on. So each start has a place of its own.
#
#     first start      meshc/failure    {rank 1 died at step 10}
#     second start     meshc/1/failure  nothing yet
#
# Agents on several nodes count restarts by themselves, and may count differently: there a restart wants a store of its own.


def place_of_this_start() -> str:
    """The prefix of all that meshc writes to the process group's store, the same on all ranks. Raises StateError on a node that torchrun
    has restarted beside others, with a store that it has kept."""
    restarts = environment.restart_count()
    if restarts == "0" or not environment.agent_serves_store():
        return "meshc"
    if environment.agent_count() != "1":
        raise StateError(
            "torchrun has restarted this job with the store of the earlier start, in which stands what ranks told each other then\n"
            "  what to do: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts ... on every node, which gives each start its own"
        )
    return f"meshc/{restarts}"
