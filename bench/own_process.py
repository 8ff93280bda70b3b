"""What is measured in a process of its own, forked from one that has imported everything: its memory and its caches are no one else's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TypeVar

Answer = TypeVar("Answer")


def in_a_process(measure: Callable[..., Answer], *asked: object) -> Answer:
    """`measure(*asked)`. Raises EOFError if the process ends without an answer."""
    (found,) = each_in_a_process(_one, measure, *asked)
    return found


def each_in_a_process(measures: Callable[..., Iterator[Answer]], *asked: object) -> Iterator[Answer]:
    """What `measures(*asked)` yields, as it comes. Raises EOFError if the process ends without the last of it."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_answer, args=(theirs, measures, *asked))
    child.start()
    theirs.close()
    while (found := mine.recv()) is not None:
        yield found[0]
    child.join()


def _one(measure: Callable[..., Answer], *asked: object) -> Iterator[Answer]:
    yield measure(*asked)


def _answer(pipe: Connection, measures: Callable[..., Iterator[object]], *asked: object) -> None:
    for found in measures(*asked):
        pipe.send((found,))
    pipe.send(None)
