"""torch's softmax over clusters of classes: each row's loss, with clusters that have no target; what is likeliest; gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.meaning.checks import module_means_itself, step_means_itself


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.words = nn.Linear(6, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 24, [4, 8, 12], div_value=2.0)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x)
        found = self.words(h, target)
        return found.output, found.loss, self.words(h[0], target[0]).loss, self.words.predict(h)


TARGETS = {"all": [0, 5, 9, 23, 3, 11, 4, 20], "two clusters": [0, 5, 5, 1, 3, 6, 4, 7]}


@pytest.mark.parametrize("targets", TARGETS)
def test_a_program_is_one_device(targets: str) -> None:
    torch.manual_seed(0)
    module_means_itself(Words(), {"x": torch.randn(8, 6), "target": torch.tensor(TARGETS[targets])}, "dp=2,tp=2")


def test_steps_are_one_devices_where_every_cluster_has_a_target() -> None:
    torch.manual_seed(0)
    step_means_itself(Words(), {"x": torch.randn(8, 6), "target": torch.tensor(TARGETS["all"])}, "dp=2,tp=2")
