"""Sums that tell tensors apart, and ranks that compare them through a store; models that ranks compile in different orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from meshc.errors import StateError
from meshc.runtime.failure.failed_rank import FailureBoard
from meshc.runtime.state.adoption import refuse_crossed
from meshc.runtime.state.changes import Pace
from meshc.runtime.state.replicas import BLOCK, Account, compare, sketch_distance, sums


def share(one: torch.Tensor, other: torch.Tensor) -> float:
    return sketch_distance(sums([one])[0].tolist(), sums([other])[0].tolist())


def test_what_a_tensor_sums_up_to() -> None:
    x = torch.arange(12.0).view(3, 4)
    norm = math.sqrt(sum(i * i for i in range(12)))
    assert sums([x, x.to(torch.int64), x.to(torch.bfloat16)])[:, 1].tolist() == pytest.approx([norm] * 3)
    assert sums([x, x.t().contiguous().t()])[0].tolist() == sums([x, x.t().contiguous().t()])[1].tolist()
    assert sums([]).shape == (0, 2) and sums([torch.zeros(0)]).tolist() == [[0.0, 0.0]]
    assert sums([torch.tensor([3 + 4j])])[0, 1].item() == 5.0


def test_how_far_tensors_are_apart() -> None:
    torch.manual_seed(0)
    x = torch.randn(BLOCK // 64 + 5, 128)  # three blocks, the last one short
    assert share(x, x.clone()) == 0.0 and share(x, x * (1 + 1e-7)) < 1e-6
    assert share(x, 3 * x) > 0.66
    assert share(x, x.roll(1, 0)) > 0.01 and share(x, torch.cat((x[2048:4096], x[:2048], x[4096:]))) > 0.01  # rows, and blocks, in turn
    row = x.clone()
    row[7] = 0
    assert 1e-4 < share(x, row)
    nothing = torch.full_like(x, float("nan"))
    assert share(nothing, nothing.clone()) == 0.0 and share(x, nothing) == math.inf
    assert share(torch.zeros(3), torch.zeros(3)) == 0.0


class Board:
    """What `compare` asks of a failure board."""

    def __init__(self, rank: int, ranks: int, store: dist.Store) -> None:
        self.rank, self.world_size, self.store = rank, ranks, store

    def check(self) -> None:
        pass

    def settle(self, seconds: float) -> None:
        pass


Ask = Callable[..., None]


@pytest.fixture
def ask() -> Ask:
    """A rank of four asks, with what it has: `a` is of all, `b` of ranks 0 and 2, of 1 and 3."""
    store = dist.HashStore()
    boards = [Board(rank, 4, store) for rank in range(4)]

    def call(rank: int, when: str, changed: Mapping[str, Sequence[int]] | None = None, **values: float) -> None:
        holders = {"a": (0, 1, 2, 3), "b": (0, 2) if rank in (0, 2) else (1, 3)}
        here = Account({name: [value, value, 1e-5] for name, value in values.items()}, changed or {})
        compare(cast(FailureBoard, cast(Any, boards[rank])), when, here, holders, 0.0)

    return call


def test_the_last_one_that_comes_compares(ask: Ask) -> None:
    ask(0, "run 1", a=1.0, b=2.0)
    ask(1, "run 1", a=1.0, b=5.0)  # of other parts of b
    ask(2, "run 1", a=1.0, b=2.0)
    with pytest.raises(StateError, match="ranks 1 and 3 hold the same part of b, and have other values of it") as raised:
        ask(3, "run 1", a=1.0, b=6.0)
    assert "change it on every rank, without `if rank == 0`" in str(raised.value)


def test_one_rank_alone_and_at_another_time(ask: Ask) -> None:
    ask(0, "asked", a=1.0)
    ask(0, "asked", a=9.0)  # at one time it says one thing
    ask(1, "asked later", a=7.0)
    ask(1, "asked", a=1.0)


def test_roundings_are_named_and_not_refused(ask: Ask) -> None:
    ask(0, "run 1", a=1.0)
    with pytest.warns(UserWarning, match="ranks 0 and 1 hold the same part of a, and their values differ by up to 1e-03"):
        ask(1, "run 1", a=1.001)
    ask(2, "run 2", a=1.0)
    ask(3, "run 2", a=1.0 + 1e-9)


def test_what_one_rank_alone_has_changed(ask: Ask) -> None:
    everybody, pair = (0, 1, 2, 3), (1, 3)
    ask(1, "state", changed={"a": everybody, "b": pair})
    ask(0, "state", changed={"a": everybody})  # and no part of b that rank 1 has
    with pytest.raises(StateError, match="between two calls b was changed on rank 1 and not on rank 3"):
        ask(3, "state", changed={"a": everybody})
    with pytest.raises(StateError, match="between two calls a was changed on rank 0 and not on rank 2"):
        ask(2, "state")


def test_a_loop_is_looked_at_ever_more_rarely() -> None:
    pace = Pace()
    assert [run for run in range(1, 40) if pace.due(run)] == [1, 2, 4, 8, 16, 32]
    assert pace.due(200) and pace.due(201) and not pace.due(202)  # after a while, as at first


def test_models_that_are_exchanged() -> None:
    refuse_crossed([["m", "m"], ["n", "n"], ["m", "m"]])
    refuse_crossed([["a0", "a1"], ["b0", "b1"]])  # each rank has values of its own
    refuse_crossed([["s0", "s1"], ["s1", "s2"], ["s2", "s3"]])  # seeded by rank and trial
    refuse_crossed([["s1", "s0"], ["s2", "s1"], ["s3", "s2"]])
    with pytest.raises(StateError, match="what is model 2 on rank 0 was model 1 on rank 1, by its first values"):
        refuse_crossed([["m", "n"], ["n", "m"]])
    with pytest.raises(StateError, match="what is model 3 on rank 0 was model 2 on rank 1"):
        refuse_crossed([["a", "b"], ["b", "c"], ["c", "a"]])
