"""Collectives and groups on real processes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshc.errors import StateError
from meshc.runtime.comm.collectives import interrupt
from meshc.runtime.comm.groups import Groups
from tests.runtime.launch import launch

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.broad)])
def test_every_collective_on_every_dim_and_dtype(ranks: int) -> None:
    run = launch("tests.runtime.programs:every_collective", ranks=ranks, timeout_s=200)
    assert run.ok, run
    for end in run.ranks:
        assert end.out == "done\n"
        assert "warn" not in end.err.lower(), run  # torch warns about some of its own names


def test_messages_to_one_rank_and_from_another() -> None:
    run = launch("tests.runtime.programs:messages_on_three_ranks", ranks=3, timeout_s=120)
    assert run.ok, run
    assert [end.out for end in run.ranks] == ["done\n"] * 3


def test_groups_of_a_2x2_mesh() -> None:
    run = launch("tests.runtime.programs:groups_of_a_mesh", ranks=4, timeout_s=120)
    assert run.ok, run
    assert [end.out for end in run.ranks] == ["done\n"] * 4


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(StateError, match="for the 4 ranks of the mesh dp=2,tp=2, but 3 were started: start 4, or compile for 3"):
        Groups({"dp": 2, "tp": 2}, 0, 3)


def test_there_is_nothing_to_interrupt_of_a_group_that_was_destroyed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    dist.destroy_process_group()
    interrupt(group)
