"""The loss of what frames say, row by row, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshc.errors import InputError
from meshc.ops.ctc import chosen_in_front, loss_of_rows, rows_of_list

GENERATOR = torch.Generator().manual_seed(0)
FRAMES, LENGTHS = torch.tensor([9, 7, 2, 9]), torch.tensor([3, 1, 4, 0])
"""Of the third row more is to be said than it has frames."""


def chances() -> Tensor:
    return torch.randn(9, 4, 6, generator=GENERATOR, dtype=torch.float64).log_softmax(-1).requires_grad_()


def targets() -> Tensor:
    return torch.randint(1, 6, (4, 5), generator=GENERATOR)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_it_gives_what_torch_gives(reduction: str) -> None:
    x, said = chances(), targets()
    mine: dict[str, Any] = dict(reduction=reduction, zero_infinity=True)
    found, wanted = (loss(x, said, FRAMES, LENGTHS, **mine) for loss in (loss_of_rows, F.ctc_loss))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x), torch.autograd.grad(wanted.square().sum(), x))


def test_what_cannot_be_said_is_infinite() -> None:
    x, said = chances(), targets()
    found, wanted = (loss(x, said, FRAMES, LENGTHS, reduction="none") for loss in (loss_of_rows, F.ctc_loss))
    torch.testing.assert_close(found, wanted)
    assert found.isinf().tolist() == [False, False, True, False]


def test_one_row_and_another_blank_and_lengths_that_are_no_tensors() -> None:
    x, said = chances(), targets() - 1
    found, wanted = (loss(x[:, 0], said[0, :3], (9,), (3,), blank=5) for loss in (loss_of_rows, F.ctc_loss))
    torch.testing.assert_close(found, wanted)
    found, wanted = (loss(x, said, [9, 9, 9, 9], [3, 3, 3, 3], blank=5) for loss in (loss_of_rows, F.ctc_loss))
    torch.testing.assert_close(found, wanted)


def test_targets_in_one_list_are_those_of_the_rows() -> None:
    x, said = chances(), targets()
    listed = torch.cat([row[:length] for row, length in zip(said, LENGTHS, strict=True)])
    found = loss_of_rows(x, rows_of_list(listed, LENGTHS), FRAMES, LENGTHS, reduction="none")
    torch.testing.assert_close(found, F.ctc_loss(x, listed, FRAMES, LENGTHS, reduction="none"))
    assert rows_of_list(listed[:0], torch.zeros(4, dtype=torch.int64)).shape == (4, 0)


def test_what_is_chosen_comes_first_in_its_order() -> None:
    said = torch.tensor([[7, 8, 9], [4, 5, 6]])
    assert chosen_in_front(said, torch.tensor([[False, True, True], [True, False, True]])).tolist() == [[8, 9, 7], [4, 6, 5]]


@pytest.mark.parametrize(
    ("said", "frames", "told"),
    [
        (torch.ones(4, 5, dtype=torch.int64), FRAMES + 1, "the frames of a row may be 0 to 9, and one is 10"),
        (torch.ones(4, 3, dtype=torch.int64), FRAMES, "the targets of a row may be 0 to 3, and one is 4"),
        (torch.full((4, 5), 6), FRAMES, "a target may be 0 to 5, and one is 6"),
    ],
    ids=["frames", "targets", "classes"],
)
def test_what_a_kernel_would_read_past_an_end_for_is_refused(said: Tensor, frames: Tensor, told: str) -> None:
    with pytest.raises(InputError, match=f"meshc::ctc_loss: {told}\n  what to do: "):
        torch.ops.meshc.ctc_loss(chances().detach(), said, frames, LENGTHS, 0, False)


def test_an_operator_takes_no_list() -> None:
    with pytest.raises(ValueError, match=r"meshc::ctc_loss: targets are \[rows, s\]"):
        torch.ops.meshc.ctc_loss(chances().detach(), torch.ones(12, dtype=torch.int64), FRAMES, LENGTHS, 0, False)
