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
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, TypeVar

import torch.distributed as dist

from meshc import errors
from meshc.errors import MeshcError, PeerError, StateError
from meshc.runtime.failure.failed_rank import FailureBoard
from meshc.runtime.failure.peers import AwaitedRanks

_POLL_S: Final = 0.01
_LONG_POLL_S: Final = 0.1
"""Interval to which that of a wait for rank 0's work grows."""
_LOOK_S: Final = 1.0
"""Interval at which a waiting rank looks for the ranks that are missing."""
REFUSAL_S: Final = 5.0
"""Seconds that a rank that refuses waits for the others to refuse, or to be seen doing something else."""
_TURNS: Final = itertools.count()
"""Numbers of the exchanges, which all ranks enter in one order."""
PIECE: Final = 1 << 20
"""Bytes: torch's store refuses values of more than 8 MiB."""
_SENT: Final[list[str]] = []
"""Keys that this rank, as rank 0, has written and not yet deleted."""
Given = TypeVar("Given")
_MET: Final[dict[str, str]] = {}
"""Ranks of a rendezvous -> this rank's key in the store of the last one."""
_DOING: Final = "what they do"
_REFUSE: Final = "refuse"
_LONG: Final = 200
_DIGEST: Final = "digest "


class Disagreement(Exception):
    """Ranks differ in `field`. `mine` and `theirs` are what this rank and rank `other` described; `alone`: rank `other` has moved on."""

    def __init__(self, field: str, mine: str, other: int, theirs: str, advice: str = "", alone: bool = False) -> None:
        gone_on = f"ranks differ in {field}: this rank has {mine}, and rank {other} has gone on with what it had before"
        super().__init__((gone_on if alone else _difference(field, mine, other, theirs)) + advice)
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
    error: Callable[[Disagreement], MeshcError] = lambda difference: StateError(str(difference)),
) -> None:
    """Returns when every rank has the same description. All ranks call it in the same order; `doing` names the action for messages.

    advice  field -> what to do if it differs
    ahead   the field to report if another rank runs already the call that this one still prepares; the first by default
    behind  further descriptions that may explain a difference; they are compared only if there is one
    error   makes an error of a Disagreement; StateError by default

    Raises that error on the ranks that differ from most (from rank 0, if there is no majority) and PeerError on the others. If another rank
    runs the call that this one still prepares, the error is raised at once; if one refuses, PeerError.
    """
    ahead = ahead or next(iter(mine))
    try:
        described = _exchange(board, {_DOING: doing, **{field: _short(text) for field, text in mine.items()}})
    except _Ahead as found:
        raise error(Disagreement(ahead, mine[ahead], found.rank, "", _todo(advice, ahead), alone=True)) from None
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
            raise error(Disagreement(field, here, other, there, more))
        raise PeerError(f"rank {other} failed to {doing}: {_difference(field, here, other, there)}{more}")


def _todo(advice: Callable[[str], str] | None, field: str) -> str:
    return f"\n  what to do: {advice(field)}" if advice else ""


def _in_full(board: FailureBoard, field: str, mine: Mapping[str, str], other: int) -> tuple[str, str]:
    """The full text of a field on rank `other`, and a text of possible causes. All ranks call this, since all have seen the difference."""
    store, turn = store_of(board), next_turn()
    store.set(f"in_full/{turn}/{board.rank}", json.dumps(dict(mine)))
    _wait(board, {other: f"in_full/{turn}/{other}"})
    theirs = json.loads(store.get(f"in_full/{turn}/{other}"))
    differing = [name for name in mine if name != field and mine[name] != theirs[name]]
    return theirs[field], "".join(f"\n  what may be behind it: {_difference(name, mine[name], other, theirs[name])}" for name in differing)


def _short(text: str) -> str:
    """`text`, or its digest if it is long: every rank reads all descriptions, and long ones are sent only if they differ."""
    return text if len(text) <= _LONG else _DIGEST + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _exchange(board: FailureBoard, mine: Mapping[str, str], timeout_s: float = float("inf")) -> list[dict[str, str]]:
    """The descriptions of all ranks, in the order of ranks. Raises _Ahead, PeerError, or TimeoutError."""
    store, turn = store_of(board), next_turn()
    if mine[_DOING] != _REFUSE:  # which a rank may do alone
        board.numbers.note_sends(range(board.world_size))
    store.set(f"{turn}/{board.rank}", json.dumps(dict(mine)))
    keys = [f"{turn}/{rank}" for rank in range(board.world_size)]
    deadline = time.monotonic() + timeout_s

    def look() -> None:
        ahead = board.ahead()
        if ahead is not None and not store.check(keys):  # or it has left this round already
            raise _Ahead(ahead)
        if time.monotonic() > deadline:
            raise TimeoutError

    _wait(board, dict(enumerate(keys)), mine[_DOING], look)
    described = [json.loads(store.get(key)) for key in keys]
    store.delete_key(f"{turn - 1}/{board.rank}")  # all have come to this round, so all have read the last one
    return described


def store_of(board: FailureBoard) -> dist.Store:
    return dist.PrefixStore("agreement", board.store)


def next_turn() -> int:
    """The number of the next exchange through the store. All ranks call this, in one order, whether or not they will receive."""
    return next(_TURNS)


def _wait(board: FailureBoard, keys: Mapping[int, str], doing: str = "", look: Callable[[], None] = lambda: None) -> None:
    """Returns when the store has all `keys` (rank -> the key that it writes). Raises PeerError if a rank has failed, or a missing one has
    left.

    doing  what the missing ranks, of which the board is told, have not come to: so a warning of a long wait names them. "": none is due,
           since rank 0 works for all
    look   called at each poll; may raise
    """
    store, looked_at, pause_s = store_of(board), time.monotonic(), _POLL_S
    try:
        while not store.check([*keys.values()]):
            board.check()
            look()
            if time.monotonic() >= looked_at + _LOOK_S:
                looked_at = time.monotonic()
                missing = frozenset(rank for rank, key in keys.items() if not store.check([key]))
                if doing and (board.awaited is None or board.awaited.ranks != missing):
                    board.awaited = AwaitedRanks(missing, doing)
                for rank in missing:
                    board.refuse_gone(rank, lambda rank=rank: store.check([keys[rank]]))  # type: ignore[misc]
            time.sleep(pause_s)
            pause_s = _POLL_S if doing else min(pause_s + _POLL_S, _LONG_POLL_S)
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


@contextmanager
def raised_on_all(board: FailureBoard, turn: int) -> Iterator[None]:
    """A context for rank 0 before `send`: a MeshcError inside is raised by `receive` too, and is no failure of a rank: the run can go on
    where it is caught."""
    try:
        yield
    except PeerError:
        raise
    except MeshcError as error:
        error.everywhere = error.compared = True
        store_of(board).set(_sent_key(turn), json.dumps({"kind": type(error).__name__, "text": str(error)}))
        raise


def send(board: FailureBoard, turn: int, data: bytes) -> None:
    """Writes `data` to the store, on rank 0: compressed, in pieces that the store accepts, and at last how many, with a hash of all."""
    store, key = store_of(board), _sent_key(turn)
    small = zlib.compress(data, 6)
    pieces = [small[begin : begin + PIECE] for begin in range(0, len(small), PIECE)]
    for index, piece in enumerate(pieces):
        store.set(f"{key}/{index}", piece)  # type: ignore[arg-type]  # bytes too
        _SENT.append(f"{key}/{index}")
    _SENT.append(key)
    store.set(key, json.dumps({"pieces": len(pieces), "hash": _hash(small)}))


def delete_sent(board: FailureBoard) -> None:
    """Deletes what was sent from the store, on rank 0. All ranks must have read it, as after a later agreement."""
    store = store_of(board)
    while _SENT:
        store.delete_key(_SENT.pop())


def receive(board: FailureBoard, turn: int) -> bytes:
    """The bytes that rank 0 sends in this turn, without a timeout. Raises what rank 0 has raised, PeerError if a rank fails or rank 0
    leaves before, StateError if they arrive corrupted."""
    store, key = store_of(board), _sent_key(turn)
    _wait(board, {0: key})
    head = json.loads(store.get(key))
    if "kind" in head:
        raised: MeshcError = getattr(errors, head["kind"], MeshcError)(head["text"])
        raised.everywhere = raised.compared = True
        raise raised
    small = b"".join(store.get(f"{key}/{index}") for index in range(head["pieces"]))
    if _hash(small) != head["hash"]:
        raise StateError("what rank 0 has sent came otherwise than it was sent\n  what to do: look at the network, and start again")
    return zlib.decompress(small)


def _sent_key(turn: int) -> str:
    return f"sent/{turn}"


def digest_number(values: Iterable[bytes]) -> int:
    """A digest of values, in 64 bits."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        state.update(value)
    return int.from_bytes(state.digest(), "big", signed=True)


def first_other(values: Sequence[object]) -> int | None:
    """The first rank whose value is not rank 0's; None if all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def from_rank_0(board: FailureBoard | None, work: Callable[[], Given]) -> Given:
    """The result of `work` on rank 0 (a JSON value), or its MeshcError, on every rank. All ranks call this, in one order; the others wait
    without a timeout."""
    if board is None:
        return work()
    turn = next_turn()
    if board.rank == 0:
        with raised_on_all(board, turn):
            value = work()
        send(board, turn, json.dumps(value).encode())
        return value
    given: Given = json.loads(receive(board, turn))
    return given


def to_rank_0(board: FailureBoard | None, text: str) -> list[str] | None:
    """The texts of all ranks, in the order of ranks, on rank 0; None on the others, without waiting. All ranks call this, in one order."""
    if board is None:
        return [text]
    store, turn = store_of(board), next_turn()
    keys = [f"to_rank_0/{turn}/{rank}" for rank in range(board.world_size)]
    store.set(keys[board.rank], text)
    if board.rank != 0:
        return None
    _wait(board, dict(enumerate(keys)), "hand in what rank 0 collects")
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
    _wait(board, keys, what)
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
