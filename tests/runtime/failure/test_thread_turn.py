"""One thread at a time, whatever it does inside; the others are refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import meshc
from meshc.runtime.failure.thread_turn import ThreadTurn


def in_a_thread(function: Callable[[], Any], name: str = "the second") -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_another_thread_is_refused_and_this_one_may_come_again() -> None:
    turn = ThreadTurn()
    with turn.hold("call"):
        with turn.hold("compile"):
            pass
        error = in_a_thread(lambda: turn.take("save"))
    assert isinstance(error, meshc.StateError)
    assert "two threads use meshc at once: MainThread is in compile, and the second came to save" in str(error)
    assert in_a_thread(lambda: turn.hold("save").__enter__() or turn.give()) is None


def test_a_turn_is_given_back_by_who_raises() -> None:
    turn = ThreadTurn()
    with pytest.raises(ValueError), turn.hold("call"):
        raise ValueError
    assert in_a_thread(lambda: turn.hold("call").__enter__() or turn.give()) is None
