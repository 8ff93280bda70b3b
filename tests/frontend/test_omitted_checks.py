"""Branches on what tensors hold that only raise are checks, which a program does not make; others are refused. What Dynamo refuses for
strides alone is taken."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import meshc
from meshc.errors import CaptureError
from meshc.frontend.side_effects import LEFT_OUT
from tests.frontend import looking
from tests.frontend.looking import Asking, Checked, Scoring, Writing, caught, computed, of_numbers, of_two, plain, told, turned_round
from tests.meaning.checks import module_means_itself

INPUTS = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("check", [plain, of_two, turned_round, of_numbers, told])
def test_a_check_is_left_out_and_its_line_is_named(check: Callable[[Tensor], None]) -> None:
    first = check.__code__.co_firstlineno
    place = f"looking.py:({first + 1}|{first + 2}): (if|assert)"
    with pytest.warns(UserWarning, match=f"(?s)checks what tensors hold, {LEFT_OUT} does.*{place}"):
        meshc.compile(Checked(check), meshc.Mesh("dp=2"), kwargs=INPUTS)


def test_the_rest_means_what_it_means() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module_means_itself(Checked(of_two), INPUTS, "dp=2")


@pytest.mark.parametrize("check", [caught, computed])
def test_a_branch_that_does_more_is_refused(check: Callable[[Tensor], None]) -> None:
    with pytest.raises(CaptureError, match=r"(?s)[Dd]ata-dependent branching.*looking.py.*what to do: replace the branch"):
        meshc.compile(Checked(check), meshc.Mesh("dp=2"), kwargs=INPUTS)


def test_nothing_is_left_out_of_the_model_itself() -> None:
    model = Checked(plain)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        meshc.compile(model, meshc.Mesh("dp=2"), kwargs=INPUTS)
    with pytest.raises(ValueError, match="a number is none"):
        model.forward(INPUTS["x"] / 0 * 0)


@pytest.mark.parametrize("by_call", [False, True])
def test_a_value_may_ask_for_a_gradient(by_call: bool) -> None:
    module_means_itself(Asking(by_call), INPUTS, "dp=2")


WRITES = (looking.columns, looking.one_tile, looking.turned, looking.two_results, looking.other_dtype, looking.over_itself)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_result_goes_into_a_view(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    module_means_itself(Writing(write), INPUTS, "dp=2,tp=2")


def test_a_result_of_another_shape_than_its_room_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)Shape mismatch.*looking.py:\d+ in larger.*what to do: leave out= out"):
        meshc.compile(Writing(looking.larger), meshc.Mesh("dp=2"), kwargs=INPUTS)


def test_a_backward_asks_for_strides_where_a_result_is_none() -> None:
    module_means_itself(Scoring(), INPUTS, "dp=2,tp=2")
