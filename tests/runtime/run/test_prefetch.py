"""Batches ahead: in order, loaded while the loop works, with the loader's errors where they belong, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import meshc
from meshc.runtime.run.prefetch import Prefetched

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Any
    name: str


def threads() -> int:
    return sum(thread.name == "meshc prefetch" for thread in threading.enumerate())


def test_each_epoch_has_the_loaders_batches_in_order() -> None:
    data = TensorDataset(torch.arange(10).unsqueeze(1), torch.arange(10))
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    twin = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    ahead = Prefetched(loader, CPU, 2)
    assert len(ahead) == 3
    for _ in range(2):
        for ours, theirs in zip(ahead, twin, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert threads() == 0


def test_structures_stay() -> None:
    batch = {"pair": Pair(torch.ones(2), "a"), "rest": [1, None, torch.zeros(())]}
    (found,) = Prefetched([batch], CPU, 1)
    assert type(found["pair"]) is Pair and found["pair"].name == "a" and found["rest"][:2] == [1, None]
    (moved,) = Prefetched([batch], torch.device("meta"), 1)
    assert moved["pair"].x.is_meta and moved["rest"][2].is_meta and not batch["pair"].x.is_meta


def test_the_next_are_loaded_meanwhile_and_no_more() -> None:
    loaded: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(6):
            loaded.append(number)
            yield number

    running = iter(Prefetched(batches(), CPU, 2))
    assert next(running) == 0
    deadline = time.monotonic() + 10
    while len(loaded) < 4 and time.monotonic() < deadline:  # one is in the loop, two are ready, one waits for its place
        time.sleep(0.01)
    time.sleep(0.05)
    assert loaded == [0, 1, 2, 3]
    assert list(running) == [1, 2, 3, 4, 5]


def test_an_error_comes_where_its_batch_would_have() -> None:
    def batches() -> Iterator[int]:
        yield 0
        raise ValueError("the second file is missing")

    taken = []
    with pytest.raises(ValueError, match="the second file is missing"):
        for number in Prefetched(batches(), CPU, 2):
            taken.append(number)
    assert taken == [0] and threads() == 0


def test_a_loop_that_is_left_leaves_no_thread() -> None:
    def batches() -> Iterator[int]:
        while True:
            yield 1

    for _ in Prefetched(batches(), CPU, 3):
        break
    else:
        raise AssertionError
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 0


def test_none_ahead_is_refused() -> None:
    with pytest.raises(meshc.InputError, match="ahead=0"):
        Prefetched([1], CPU, 0)
