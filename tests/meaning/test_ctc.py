"""A loss of what frames say, with the targets of all rows in one list, as speech models have it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import trace_rules

import meshc
from meshc.errors import CaptureError
from tests.meaning.checks import step_means_itself


class Speech(nn.Module):
    """`how`: the targets are picked by a mask, given as one list, or given in rows; "more": all but one are picked, and one is missing."""

    def __init__(self, how: str = "picked") -> None:
        super().__init__()
        self.head, self.how = nn.Linear(8, 6), how

    def forward(self, frames: Tensor, labels: Tensor, length: Tensor) -> Tensor:
        logs, kept = self.head(frames).log_softmax(-1).transpose(0, 1), labels >= 0
        if self.how == "listed":
            return F.ctc_loss(logs, labels[0], length, (length > 3).long() + 1, zero_infinity=True)
        if self.how == "rows":
            return nn.CTCLoss(reduction="sum")(logs, labels.clamp(min=0), length, kept.sum(-1))
        picked = labels.masked_select(kept) if self.how == "picked" else labels[labels > 1]
        with torch.backends.cudnn.flags(enabled=False):
            return F.ctc_loss(logs, picked, length, kept.sum(-1), zero_infinity=True)


def case(how: str) -> tuple[Speech, dict[str, Tensor]]:
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2, -100], [-100, 3, 3], [4, -100, -100], [1, 5, 2]])
    labels = torch.tensor([[1, 2, 3, 1, 2, 4, 5]]).expand(4, 7) if how == "listed" else labels
    return Speech(how), {"frames": torch.randn(4, 7, 8), "labels": labels, "length": torch.tensor([7, 7, 6, 3])}


@pytest.mark.parametrize("how", ["picked", pytest.param("rows", marks=pytest.mark.broad), "listed"])
def test_a_step_equals_one_device(how: str) -> None:
    step_means_itself(*case(how), "dp=2,tp=2")


def test_targets_that_other_lengths_count_are_refused_with_the_line() -> None:
    model, inputs = case("more")
    with pytest.raises(CaptureError, match=r"(?s)labels\[labels > 1\].*what to do: "):
        meshc.compile(model, meshc.Mesh("dp=2"), kwargs=inputs)


def test_it_may_be_the_first_that_a_process_traces() -> None:
    """Dynamo looks torch's functions up then, and would take what stands for one for torch's."""
    model, inputs = case("picked")
    trace_rules.clear_lru_cache()
    meshc.compile(model, meshc.Mesh("dp=2"), kwargs=inputs)
