"""State and activations on the host of one GPU: the losses of the step without, and less memory. Needs a GPU; nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch

import meshc
from tests import models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("lines", ["offload state\noffload *", "offload params\noffload state", "offload state, update"])
def test_losses_and_state_are_those_of_the_step_without(mesh, lines):
    case = models.FACTORIES["nanogpt"]()
    case.model.cuda()
    inputs = {key: value.cuda() for key, value in case.call_kwargs.items()}
    found = []
    for plan in (None, lines):
        model = copy.deepcopy(case.model)
        step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), loss=case.loss, clip_grad_norm=1.0)
        program = meshc.compile(step, mesh, kwargs=inputs, plan=plan)
        losses = [float(program(**inputs)) for _ in range(5)]
        found.append((losses, program.state_dict(full=True)))
    (plain, state), (offloaded, there) = found
    assert plain == pytest.approx(offloaded, rel=1e-5)
    near = 1e-5 if "update" in lines else 1e-6  # which the host computes
    for name, value in state["model"].items():
        torch.testing.assert_close(there["model"][name], value, rtol=1e-4, atol=near)
