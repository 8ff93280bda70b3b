"""A sample of the faults that `make mutate` plants: none gets through, and every kind has a place somewhere."""

from __future__ import annotations

import pytest

from tests.proof.edited_lines import KINDS
from tests.proof.mutants import Mutant, with_place

SMALL = ("gpt dp tp", "gpt pipeline", "gpt fsdp microbatches", "rows uneven", "zigzag", "experts whose rows are sent")
COUNT = 20


@pytest.mark.parametrize("name", SMALL)
def test_no_fault_gets_through(name: str) -> None:
    through = [f"{mutant}: {why}" for mutant, what, why in with_place(COUNT, seed=3, names=(name,)) if what == "through"]
    assert through == []


def test_there_are_sixty_kinds() -> None:
    assert len(KINDS) >= 60


def test_a_fault_that_changes_nothing_is_equal_and_one_that_changes_a_number_is_refused() -> None:
    equal = Mutant("gpt inference", "turns_a_flag", 499233774)
    assert equal.outcome() == ("equal", "")
    what, why = Mutant("gpt dp tp", "exchanges_gradients", 0).outcome()
    assert what == "proof" and "no traced update takes" in why


@pytest.mark.parametrize("mutant", [
    Mutant("gpt inference", "leaves_an_all_reduce_out", 681398158),  # what is reshaped is partial, as its lowering's result is not
    Mutant("gpt inference", "leaves_a_line_out", 742172624),
    Mutant("open sizes", "takes_from_an_integer", 254843888),  # a gradient of four positions for a slice of three
], ids=str)  # fmt: skip
def test_those_that_came_through_once_are_refused(mutant: Mutant) -> None:
    assert mutant.outcome()[0] == "proof"
