"""Training steps of stock models on one GPU beside the same model without meshc. Needs a GPU; nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch

import meshc
from tests.models import Case
from tests.zoo.stock import STOCK

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FAMILIES = ("llama", "gpt2", "bert", "vit", "swin", "convnext", "mistral", "mixtral", "mamba", "gemma2")


def on_gpu(name: str, dtype: torch.dtype) -> Case:
    """Without dropout, whose draws are meshc's own."""
    case = STOCK[name].case(name)
    case.model.to("cuda", dtype).eval()
    case.kwargs = {
        key: value.to("cuda", dtype if value.is_floating_point() else None) if isinstance(value, torch.Tensor) else value
        for key, value in case.kwargs.items()
    }
    return case


def plain_losses(case: Case, autocast: torch.dtype | None = None, count: int = 3) -> tuple[list[float], torch.nn.Module]:
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            loss = model(**case.kwargs).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, model


def compiled_losses(mesh, case: Case, autocast: torch.dtype | None = None, count: int = 3, **how) -> list[float]:
    step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters(), lr=1e-2, eps=1e-4))
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        program = meshc.compile(step, mesh, kwargs=case.kwargs, **how)
        return [float(program(**case.kwargs)) for _ in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_in_float64(mesh, name):
    case = on_gpu(name, torch.float32 if name == "mixtral" else torch.float64)  # torch's grouped products are of 32 bits at most
    wanted, twin = plain_losses(case)
    assert compiled_losses(mesh, case) == pytest.approx(wanted, rel=3e-6)  # stock losses are float32
    for (key, found), other in zip(case.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), other, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("what", ["documents", "padding"])
def test_masks_that_are_tensors(mesh, what):
    case = on_gpu("llama", torch.float64)
    rows, length = case.kwargs["input_ids"].shape
    at = torch.arange(length, device="cuda").expand(rows, length)
    if what == "documents":
        case.kwargs["position_ids"] = torch.where(at < length // 3, at, at - length // 3)
    else:
        case.kwargs["attention_mask"] = (at < length - torch.arange(rows, device="cuda").unsqueeze(1)).long()
    wanted, _ = plain_losses(case)
    assert compiled_losses(mesh, case) == pytest.approx(wanted, rel=3e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mamba"])
@pytest.mark.parametrize("cuda_graph", [False, "auto"])
def test_steps_under_inductor(mesh, name, cuda_graph):
    case = on_gpu(name, torch.float32)
    wanted, _ = plain_losses(case, count=6)
    options = meshc.Options(debugging=meshc.Debugging(cuda_graph=cuda_graph))
    assert compiled_losses(mesh, case, backend="inductor", options=options, count=6) == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_steps_under_autocast(mesh, name):
    case = on_gpu(name, torch.float32)
    wanted, _ = plain_losses(case, torch.bfloat16)
    assert compiled_losses(mesh, case, torch.bfloat16) == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba"])
def test_steps_in_bfloat16(mesh, name):
    case = on_gpu(name, torch.bfloat16)
    wanted, _ = plain_losses(case)
    assert compiled_losses(mesh, case) == pytest.approx(wanted, rel=3e-2)


def test_a_loop_of_ones_own(mesh):
    """Module mode: the model's call, backward, and an optimizer outside."""
    case = on_gpu("llama", torch.float64)
    wanted, _ = plain_losses(case)
    meshc.compile(case.model, mesh, kwargs=case.kwargs)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2, eps=1e-4)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = case.model(**case.kwargs).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    assert found == pytest.approx(wanted, rel=3e-6)


def test_verify(mesh):
    case = on_gpu("llama", torch.float32)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters(), lr=1e-2))
    program = meshc.compile(step, mesh, kwargs=case.kwargs)
    program(**case.kwargs)
    assert meshc.verify(program, case.kwargs).ok
