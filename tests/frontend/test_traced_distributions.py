"""`torch.distributions` in a model: a program equals the model on one device, with the same draws; and torch is afterwards as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal, kl, kl_divergence

import meshc
from tests.captured import Captured
from tests.models import Case


class Autoencoder(nn.Module):
    """A variational one: a drawn code, the likelihood of the input, and how far the code's distribution is from the prior."""

    def __init__(self, checked: bool | None = None) -> None:
        super().__init__()
        self.encode, self.decode, self.checked = nn.Linear(8, 8), nn.Linear(4, 8), checked

    def forward(self, x: Tensor) -> Tensor:
        mean, log_scale = self.encode(x).chunk(2, -1)
        code = Normal(mean, log_scale.exp(), validate_args=self.checked)
        likely = Normal(self.decode(code.rsample()), 1.0).log_prob(x).sum(-1)
        return (kl_divergence(code, Normal(torch.zeros_like(mean), 1.0)).sum(-1) - likely).mean()


class Policy(nn.Module):
    """Drawn actions, their logarithms, and entropies."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        actions = Categorical(logits=self.score(x))
        return Bernoulli(logits=self.score(x)).entropy().mean() - actions.log_prob(actions.sample()).mean() - actions.entropy().mean()


@pytest.mark.parametrize("model", [Autoencoder, Policy])
def test_a_step_of_distributions_equals_one_device(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    checked = Distribution._validate_args
    case = Case("drawn", model(), {"x": torch.randn(6, 8)}, lambda output: output)
    Captured(case, train=True, double=True).verify_training("dp=2,tp=2", None, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert Distribution._validate_args is checked and len(kl._KL_MEMOIZE) < len(kl._KL_REGISTRY)


def test_arguments_that_are_to_be_checked_are_refused() -> None:
    with pytest.raises(meshc.CaptureError, match=r"(?s)test_traced_distributions.py:.*what to do: leave validate_args out"):
        meshc.compile(Autoencoder(checked=True), meshc.Mesh("dp=2"), args=(torch.randn(4, 8),))
