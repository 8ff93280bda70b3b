"""A step on one GPU: the losses of plain PyTorch, as it is and as one CUDA graph. Needs a GPU; nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch

import meshc
from tests import models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def steps(program, inputs, scheduler, count=8):
    losses = []
    for _ in range(count):
        losses.append(float(program(**inputs)))
        scheduler.step()
    return losses


@pytest.mark.parametrize("name", ["mlp", "nanogpt"])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_losses_are_those_of_plain_pytorch(mesh, name, cuda_graph):
    case = models.FACTORIES[name]()
    case.model.cuda()
    twin = copy.deepcopy(case.model)
    inputs = {key: value.cuda() for key, value in case.call_kwargs.items()}
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0)
    program = meshc.compile(step, mesh, kwargs=inputs, options=meshc.Options(debugging=meshc.Debugging(cuda_graph=cuda_graph)))
    found = steps(program, inputs, scheduler)

    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    plain_scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1.0 / (1 + step))
    model_inputs = {key: value.cuda() for key, value in case.kwargs.items()}
    targets = {key: value.cuda() for key, value in case.target_kwargs.items()} if case.loss else {}

    def plain_step(**_):
        plain.zero_grad()
        output = twin(**model_inputs)
        loss = case.loss(output, **targets) if case.loss else case.loss_of(output)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
        return loss

    wanted = steps(plain_step, {}, plain_scheduler)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert wanted[-1] < wanted[0]
