"""What is measured in a process of its own, forked from one that has imported everything: its memory and its caches are no one else's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

Answer = TypeVar("Answer")


def in_a_process(measure: Callable[..., Answer], *asked: object) -> Answer:
    """`measure(*asked)`. Raises EOFError if the process ends without an answer."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_answer, args=(theirs, measure, *asked))
    child.start()
    theirs.close()
    found: Answer = mine.recv()
    child.join()
    return found


def _answer(pipe: Connection, measure: Callable[..., object], *asked: object) -> None:
    pipe.send(measure(*asked))
