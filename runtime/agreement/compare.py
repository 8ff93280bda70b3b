"""Agreement of ranks through the store: comparison of descriptions, common refusals, rendezvous, gather to and broadcast from rank 0.

    rank 0  describes its inputs ──> store        reads all descriptions: equal, so it compiles
    rank 1  describes its inputs ──> store        likewise
    rank 2  has a program for its inputs already, and runs it: it never describes anything, which ranks 0 and 1 see in its `began`

Agreement uses the store rather than a collective, since a rank that waits here has to poll for failures of the others.

A refusal (inputs that do not fit, a model that cannot be traced) is compared in the same way: a rank that refuses writes it to the store.
If all have refused before anything was sent, no rank waits for another, and a caller that catches the error may go on. If another rank
begins a call, or does something else, the refusal is a failure like any other. Ranks that refuse nothing pay nothing for this.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, TypeVar

import torch.distributed as dist

from meshc import errors
from meshc.errors import MeshcError, PeerError, StateError
from meshc.runtime.failure.failed_rank import FailureBoard
from meshc.runtime.failure.peers import AwaitedRanks

_POLL_S: Final = 0.01
LONG_POLL_S: Final = 0.1
_LOOK_S: Final = 1.0
"""Interval at which a waiting rank looks for the ranks that are missing."""
REFUSAL_S: Final = 5.0
"""Seconds that a rank that refuses waits for the others to refuse, or to be seen doing something else."""
ROUNDS: Final = itertools.count()
"""Numbers of the agreements, which all ranks enter in one order."""
_MET: Final[dict[str, str]] = {}
"""Ranks of a rendezvous -> this rank's key in the store of the last one."""
_DOING: Final = "what they do"
_REFUSE: Final = "refuse"
_LONG: Final = 200
_DIGEST: Final = "digest "


class Disagreement(Exception):
    """Ranks differ in `field`. `mine` and `theirs` are what this rank and rank `other` described; `alone`: rank `other` has moved on."""

    def __init__(self, field: str, mine: str, other: int, theirs: str, advice: str = "", alone: bool = False) -> None:
        super().__init__((_difference(field, mine, other, theirs) if not alone else _left_alone(field, mine, other)) + advice)
        self.field, self.mine, self.other, self.theirs, self.alone = field, mine, other, theirs, alone


def _difference(field: str, mine: str, other: int, theirs: str) -> str:
    """The text of a difference; of two lists with semicolons, only the entries that differ."""
    here, there = mine.split("; "), theirs.split("; ")
    only_here, only_there = _only_in_first(here, there), _only_in_first(there, here)
    if not only_here and not only_there:
        only_here = only_there = "the same in another order"
    return f"ranks differ in {field}: this rank has {only_here or 'no such entry'}, rank {other} has {only_there or 'no such entry'}"


def _only_in_first(items: list[str], others: list[str]) -> str:
    known = {*others}
    found = [item for item in items if item not in known]
    shown = [item if len(item) <= 400 else f"{item[:400]}..." for item in found[:3]]
    return "; ".join(shown) + (f" and {len(found) - 3} more" if found[3:] else "")


def _left_alone(field: str, mine: str, other: int) -> str:
    return f"ranks differ in {field}: this rank has {mine}, and rank {other} has gone on with what it had before"


class _Ahead(Exception):
    """Rank `rank` runs a call that this rank has not begun."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def agree(
    board: FailureBoard,
    doing: str,
    mine: Mapping[str, str],
    advice: Callable[[str], str] | None = None,
    *,
    ahead: str = "",
    behind: Callable[[], Mapping[str, str]] = dict,
    error: Callable[[Disagreement], MeshcError] | None = None,
) -> None:
    """Returns when every rank has the same description. All ranks call it in the same order; `doing` names the action for messages.

    advice  field -> what to do if it differs
    ahead   the field to report if another rank runs already the call that this one still prepares; the first by default
    behind  further descriptions that may explain a difference; they are compared only if there is one
    error   makes an error of a Disagreement; StateError by default

    Raises that error on the ranks that differ from most (from rank 0, if there is no majority) and PeerError on the others. If another rank
    runs the call that this one still prepares, the error is raised at once; if one refuses, PeerError.
    """
    try:
        _agree(board, doing, mine, advice, ahead or next(iter(mine)), behind)
    except Disagreement as difference:
        raise (StateError(str(difference)) if error is None else error(difference)) from None


def _agree(
    board: FailureBoard,
    doing: str,
    mine: Mapping[str, str],
    advice: Callable[[str], str] | None,
    ahead: str,
    behind: Callable[[], Mapping[str, str]],
) -> None:
    try:
        described = _exchange(board, {_DOING: doing, **{field: _short(text) for field, text in mine.items()}})
    except _Ahead as found:
        raise Disagreement(ahead, mine[ahead], found.rank, "", _todo(advice, ahead), alone=True) from None
    for rank, one in enumerate(described):
        if one[_DOING] == _REFUSE:
            raise PeerError(f"rank {rank} failed: {one['kind']}: {one['text']}")
    for field in (_DOING, *mine):
        values = [one[field] for one in described]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        if list(Counter(values).values()).count(count) > 1:
            usual = values[0]
        unusual = values[board.rank] != usual
        other = next(rank for rank, value in enumerate(values) if (value == usual) == unusual)
        if field == _DOING:
            here, there, more = values[board.rank], values[other], ""
        else:
            here, (there, more) = mine[field], _in_full(board, field, {field: mine[field], **behind()}, other)
            more += _todo(advice, field)
        if unusual:
            raise Disagreement(field, here, other, there, more)
        raise PeerError(f"rank {other} failed to {doing}: {_difference(field, here, other, there)}{more}")


def _todo(advice: Callable[[str], str] | None, field: str) -> str:
    return f"\n  what to do: {advice(field)}" if advice else ""


def _in_full(board: FailureBoard, field: str, mine: Mapping[str, str], other: int) -> tuple[str, str]:
    """The full text of a field on rank `other`, and a text of possible causes. All ranks call this, since all have seen the difference."""
    store, turn = store_of(board), next(ROUNDS)
    store.set(f"in_full/{turn}/{board.rank}", json.dumps(dict(mine)))
    while not store.check([f"in_full/{turn}/{other}"]):
        board.check()
        time.sleep(_POLL_S)
    theirs = json.loads(store.get(f"in_full/{turn}/{other}"))
    differing = [name for name in mine if name != field and mine[name] != theirs[name]]
    return theirs[field], "".join(f"\n  what may be behind it: {_difference(name, mine[name], other, theirs[name])}" for name in differing)


def _short(text: str) -> str:
    """`text`, or its digest if it is long: every rank reads all descriptions, and long ones are sent only if they differ."""
    return text if len(text) <= _LONG else _DIGEST + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _exchange(board: FailureBoard, mine: Mapping[str, str], timeout_s: float = float("inf")) -> list[dict[str, str]]:
    """The descriptions of all ranks, in the order of ranks. Raises _Ahead, PeerError, or TimeoutError."""
    store, turn = store_of(board), next(ROUNDS)
    if mine[_DOING] != _REFUSE:  # which a rank may do alone
        board.numbers.note_sends(range(board.world_size))
    store.set(f"{turn}/{board.rank}", json.dumps(dict(mine)))
    keys = [f"{turn}/{rank}" for rank in range(board.world_size)]
    deadline = time.monotonic() + timeout_s
    with _wait_for_keys(board, store, dict(enumerate(keys)), mine[_DOING]) as check:
        while not store.check(keys):
            check()
            ahead = board.ahead()
            if ahead is not None and not store.check(keys):  # or it has left this round already
                raise _Ahead(ahead)
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_POLL_S)
    described = [json.loads(store.get(key)) for key in keys]
    store.delete_key(f"{turn - 1}/{board.rank}")  # all have come to this round, so all have read the last one
    return described


def store_of(board: FailureBoard) -> dist.Store:
    return dist.PrefixStore("agreement", board.store)


@contextmanager
def _wait_for_keys(board: FailureBoard, store: dist.Store, keys: Mapping[int, str], where: str) -> Iterator[Callable[[], None]]:
    """A context for waiting for `keys` (rank -> the key that it writes), with a function to call while polling. The function raises
    PeerError if a rank has failed or left, and tells the board the missing ranks, which are named in a warning if the wait is long."""
    looked_at = time.monotonic()

    def check() -> None:
        nonlocal looked_at
        board.check()
        if time.monotonic() < looked_at + _LOOK_S:
            return
        looked_at = time.monotonic()
        missing = frozenset(rank for rank, key in keys.items() if not store.check([key]))
        if board.awaited is None or board.awaited.ranks != missing:
            board.awaited = AwaitedRanks(missing, where)
        for rank in missing:
            board.refuse_gone(rank, lambda rank=rank: store.check([keys[rank]]))  # type: ignore[misc]

    try:
        yield check
    finally:
        board.awaited = None


class refusable:
    """A context for a rank's local work before it sends anything, in a call or a compilation. A MeshcError inside stops the other ranks as
    usual, unless all ranks refuse here: then the error is marked `everywhere`, and the run can go on where it is caught."""

    __slots__ = ("_board",)

    def __init__(self, board: FailureBoard | None) -> None:
        self._board = board

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        board = self._board
        if isinstance(error, MeshcError) and not isinstance(error, PeerError) and board is not None:
            if not error.compared and not board.has_failure:
                error.compared = True
                error.everywhere = all_refuse(board, error)


@contextmanager
def together(board: FailureBoard | None, what: str) -> Iterator[None]:
    """A context for work of all ranks between steps (save, load, arguments of a compilation): `guard` and `refusable` in one."""
    if board is None:
        yield
        return
    with board.guard(board.step, what), refusable(board):
        yield


def all_refuse(board: FailureBoard, error: MeshcError) -> bool:
    """Whether all ranks have raised an error of this type, within REFUSAL_S seconds."""
    try:
        described = _exchange(board, {_DOING: _REFUSE, "kind": type(error).__name__, "text": str(error)}, REFUSAL_S)
    except (_Ahead, TimeoutError):
        return False
    return all(one[_DOING] == _REFUSE and one["kind"] == type(error).__name__ for one in described)


Given = TypeVar("Given")


def from_rank_0(board: FailureBoard | None, work: Callable[[], Given]) -> Given:
    """The result of `work` on rank 0 (a JSON value), on every rank. A MeshcError of `work` is raised on all ranks, and is no failure of a
    rank: the run can go on where it is caught. All ranks call this, in one order; the others wait without a timeout."""
    if board is None:
        return work()
    store, key = store_of(board), f"from_rank_0/{next(ROUNDS)}"
    if board.rank == 0:
        try:
            value = work()
        except MeshcError as error:
            error.everywhere = True
            store.set(key, json.dumps({"kind": type(error).__name__, "text": str(error)}))
            raise
        store.set(key, json.dumps({"value": value}))
        return value
    while not store.check([key]):
        board.check()
        board.refuse_gone(0, lambda: store.check([key]))
        time.sleep(LONG_POLL_S)
    found = json.loads(store.get(key))
    if "kind" in found:
        raised: MeshcError = getattr(errors, found["kind"], MeshcError)(found["text"])
        raised.everywhere = True
        raise raised
    given: Given = found["value"]
    return given


def to_rank_0(board: FailureBoard | None, text: str) -> list[str] | None:
    """The texts of all ranks, in the order of ranks, on rank 0; None on the others, without waiting. All ranks call this, in one order."""
    if board is None:
        return [text]
    store, turn = store_of(board), next(ROUNDS)
    keys = [f"to_rank_0/{turn}/{rank}" for rank in range(board.world_size)]
    store.set(keys[board.rank], text)
    if board.rank != 0:
        return None
    with _wait_for_keys(board, store, dict(enumerate(keys)), "hand in what rank 0 collects") as check:
        while not store.check(keys):
            check()
            time.sleep(_POLL_S)
    found = [store.get(key).decode() for key in keys]
    for key in keys:
        store.delete_key(key)
    return found


def to_all(board: FailureBoard | None, text: str) -> list[str]:
    """The texts of all ranks, in the order of ranks, on every rank. All ranks call this, in one order."""
    texts = to_rank_0(board, text)
    found = from_rank_0(board, lambda: texts)
    assert found is not None
    return found


def rendezvous(board: FailureBoard, ranks: Sequence[int], what: str, turn: int) -> None:
    """Rendezvous: returns when all `ranks`, this one among them, have called it. `what` names it; `turn` is its number, equal on all."""
    store, group = store_of(board), ",".join(map(str, ranks))
    keys = {rank: f"meet/{group}/{turn}/{rank}" for rank in ranks}
    store.set(keys[board.rank], "")
    with _wait_for_keys(board, store, keys, what) as check:
        while not store.check([*keys.values()]):
            check()
            time.sleep(_POLL_S)
    store.delete_key(_MET.get(group, ""))  # all have come here, so nobody waits for the time before
    _MET[group] = keys[board.rank]


def collect_after_failure(board: FailureBoard | None, text: str, seconds: float) -> list[str] | None:
    """`to_rank_0` after a failure: the texts that arrive within `seconds` on rank 0; None on the others."""
    if board is None:
        return [text]
    store = store_of(board)
    store.set(f"behind/{board.rank}", text)
    if board.rank != 0:
        return None
    keys = [f"behind/{rank}" for rank in range(board.world_size)]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not store.check(keys):
        time.sleep(_POLL_S)
    return [store.get(key).decode() for key in keys if store.check([key])]
