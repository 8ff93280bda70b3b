"""torch's softmax over clusters of classes: each row's loss, with clusters that have no target; what is likeliest; gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshc
from tests.meaning.checks import mean_square, module_means_itself, step_means_itself


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.words = nn.Linear(6, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 24, [4, 8, 12], div_value=2.0)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x)
        found = self.words(h, target)
        return found.output, found.loss, self.words(h[0], target[0]).loss, self.words.predict(h)


TARGETS = {"all": [0, 5, 9, 23, 3, 11, 4, 20], "two clusters": [0, 5, 5, 1, 3, 6, 4, 7], "one of a cluster": [0, 5, 5, 1, 3, 6, 4, 20]}
DECAYING = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("targets", TARGETS)
def test_a_program_is_one_device(targets: str) -> None:
    torch.manual_seed(0)
    module_means_itself(Words(), {"x": torch.randn(8, 6), "target": torch.tensor(TARGETS[targets])}, "dp=2,tp=2")


@pytest.mark.parametrize("targets", TARGETS)
def test_steps_are_one_devices(targets: str) -> None:
    """With AdamW, whose decay moves whatever it does not pass over: a cluster without a target has no gradient in torch."""
    torch.manual_seed(0)
    step_means_itself(Words(), {"x": torch.randn(8, 6), "target": torch.tensor(TARGETS[targets])}, "dp=2,tp=2", optimizer=DECAYING)


def test_targets_are_counted_over_microbatches() -> None:
    class Losses(Words):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            return (self.words(self.up(x), target).output,)

    torch.manual_seed(0)
    given = {"x": torch.randn(8, 6), "target": torch.tensor(TARGETS["one of a cluster"])}
    step_means_itself(Losses(), given, "dp=2", optimizer=DECAYING, microbatches=2)


def test_a_cluster_that_something_else_calls_has_a_gradient() -> None:
    class Both(Words):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            return *super().forward(x, target), self.words.log_prob(self.up(x))

    torch.manual_seed(0)
    step_means_itself(Both(), {"x": torch.randn(8, 6), "target": torch.tensor(TARGETS["two clusters"])}, "dp=2", optimizer=DECAYING)


def test_zeros_that_a_module_hands_out_are_said() -> None:
    with pytest.warns(UserWarning, match=r"words.tail.0.0.weight, words.tail.0.1.weight and 4 more have gradients of zeros where no row"):
        given = {"x": torch.randn(8, 6).double(), "target": torch.tensor(TARGETS["all"])}
        meshc.compile(Words().double(), meshc.Mesh("dp=2"), kwargs=given)


def test_sums_over_calls_are_refused() -> None:
    model = Words().double()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=mean_square)
    given = {"x": torch.randn(8, 6).double(), "target": torch.tensor(TARGETS["all"])}
    with pytest.raises(meshc.CompileError, match=r"words.tail.0.0.weight may be chosen by no row .* adds up gradients over calls"):
        meshc.compile(step, meshc.Mesh("dp=2"), kwargs=given, options=meshc.Options(training=meshc.Training(accumulate=True)))
