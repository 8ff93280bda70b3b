"""Broadcast of bytes from rank 0 through the process group's store: compressed, and in pieces that the store accepts.

rank 0      handed/7/0, handed/7/1, ... the pieces     handed/7: how many, and a hash of all
the others  wait for handed/7 as long as rank 0 lives and no rank has failed, and then read the pieces
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import zlib
from typing import Final

from meshc.errors import StateError
from meshc.runtime.agreement.compare import LONG_POLL_S, ROUNDS, store_of
from meshc.runtime.failure.failed_rank import FailureBoard

PIECE: Final = 1 << 20
"""Bytes: torch's store refuses values of more than 8 MiB."""
_FIRST_POLL_S: Final = 0.01
_SENT: Final[list[str]] = []
"""Keys that this rank, as rank 0, has written and not yet deleted."""


def next_turn() -> int:
    """The number of the next broadcast. All ranks call this, in one order, whether or not they will receive."""
    return next(ROUNDS)


def send(board: FailureBoard, turn: int, data: bytes) -> None:
    """Writes `data` to the store, on rank 0."""
    store, key = store_of(board), f"handed/{turn}"
    small = zlib.compress(data, 6)
    pieces = [small[begin : begin + PIECE] for begin in range(0, len(small), PIECE)]
    for index, piece in enumerate(pieces):
        store.set(f"{key}/{index}", piece)  # type: ignore[arg-type]  # bytes too
        _SENT.append(f"{key}/{index}")
    _SENT.append(key)
    store.set(key, json.dumps({"pieces": len(pieces), "hash": _hash(small)}))


def delete_sent(board: FailureBoard) -> None:
    """Deletes earlier broadcasts from the store, on rank 0. All ranks must have read them, as after a later agreement."""
    store = store_of(board)
    while _SENT:
        store.delete_key(_SENT.pop())


def receive(board: FailureBoard, turn: int) -> bytes:
    """The bytes that rank 0 sends in this turn. Raises PeerError if a rank fails or leaves before, StateError if they arrive corrupted."""
    store, key = store_of(board), f"handed/{turn}"
    for tried in itertools.count():
        if store.check([key]):
            break
        board.check()
        board.refuse_gone(0, lambda: store.check([key]))
        time.sleep(min(_FIRST_POLL_S * (1 + tried), LONG_POLL_S))
    head = json.loads(store.get(key))
    small = b"".join(store.get(f"{key}/{index}") for index in range(head["pieces"]))
    if _hash(small) != head["hash"]:
        raise StateError("what rank 0 has sent came otherwise than it was sent\n  what to do: look at the network, and start again")
    return zlib.decompress(small)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
