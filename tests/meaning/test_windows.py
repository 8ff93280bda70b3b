"""Models split along space: a training step equals the model's own, and what moves are edges, not images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.report.summary import collectives
from tests.broad import broad
from tests.models import resnet
from tests.window_models import CausalMixer, UNet

Loss = Callable[..., Tensor]


def images(height: int = 16, width: int = 12) -> dict[str, Tensor]:
    return {"images": torch.randn(4, 3, height, width).double(), "target": torch.randint(3, (4, height, width))}


def states(seq: int = 10) -> dict[str, Tensor]:
    return {"input": torch.randn(4, seq, 8).double(), "target": torch.randn(4, seq, 8).double()}


def compiled(model: nn.Module, mesh: str, plan: str | None, inputs: Mapping[str, Tensor], loss: Loss) -> meshc.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return meshc.compile(meshc.TrainStep(model.double(), optimizer=optimizer, loss=loss), meshc.Mesh(mesh), kwargs=inputs, plan=plan)


def check(program: meshc.Program, inputs: Mapping[str, Tensor]) -> None:
    """Gradients, and parameters after a step."""
    report = meshc.verify(program, inputs, dtype=torch.float64)
    assert {kind.split()[0] for kind, *_ in report.rows} >= {"gradient", "parameter"}
    assert all(error < 1e-10 for kind, _, error in report.rows if not kind.startswith("parameter"))
    assert report.worst < 1e-9


def moved(program: meshc.Program) -> Counter[str]:
    """How many collectives of each kind go over axes other than tp."""
    return Counter(use.kind for use in collectives(program.compiled) if "tp" not in use.axes)


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        broad("cp=2", "cp: height"),
        broad("cp=3", "cp: width"),
        broad("h=2,w=2", "h: height\nw: width"),
        broad("dp=2,cp=2", "dp: batch\ncp: height"),
        broad("a=2,b=2", "a: height\nb: height"),
        ("tp=2,cp=2", "tp: blocks.*.weight.0\ncp: height"),
    ],
)
def test_resnet(mesh: str, plan: str) -> None:
    case = resnet(torch.float64, batch=4, width=4)
    program = compiled(case.model, mesh, plan, case.call_kwargs, F.cross_entropy)
    check(program, case.call_kwargs)
    kinds = moved(program)
    assert kinds["halo"] and kinds["halo_sum"] and not kinds["all_gather"] and not kinds["all_to_all"]


@pytest.mark.parametrize(("mesh", "plan"), [broad("cp=2", "cp: height"), ("cp=3", "cp: height"), broad("h=2,w=3", "h: height\nw: width")])
def test_unet(mesh: str, plan: str) -> None:
    """Over three ranks, eight rows are tiles of 3, 3, 2, four of 2, 2, 0."""
    inputs = images()
    program = compiled(UNet(), mesh, plan, inputs, F.cross_entropy)
    check(program, inputs)
    assert not moved(program)["all_gather"]


@pytest.mark.parametrize(
    "seq, plan",
    [(3, "sp: ffn > seq"), broad(10, "sp: seq"), broad(3, None), broad(10, "sp: ffn > seq"), broad(10, None), broad(3, "sp: seq")],
)
def test_causal_mixer(seq: int, plan: str | None) -> None:
    """Tiles shorter than the kernel, too."""
    inputs = states(seq)
    program = compiled(nn.Sequential(CausalMixer(), CausalMixer()), "sp=2", plan, inputs, F.mse_loss)
    check(program, inputs)


def test_a_causal_convolution_reads_what_comes_before_it() -> None:
    """Of ten elements in two tiles, a kernel of 4 reads the last two of the first tile; the crop then moves what its tiles lack."""
    inputs = states()
    program = compiled(nn.Sequential(CausalMixer()), "cp=2", "cp: seq", inputs, F.mse_loss)
    forward = [use for use in collectives(program.compiled) if use.phase == "forward"]
    assert [use.kind for use in forward] == ["halo", "halo"]
    assert [use.bytes_per_rank for use in forward] == [4 * 12 * 2 * 8] * 2  # batch, width, elements, bytes
    check(program, inputs)


@pytest.mark.broad
def test_a_pin_on_an_image_takes_its_rows_through_the_network() -> None:
    case = resnet(torch.float64, batch=4, width=4)
    plan = "cp: -\npin input:images: _, _, height/cp, _"
    program = compiled(case.model, "cp=2", plan, case.call_kwargs, F.cross_entropy)
    assert moved(program)["halo"] == moved(compiled(case.model, "cp=2", "cp: height", case.call_kwargs, F.cross_entropy))["halo"] > 10
    check(program, case.call_kwargs)


@pytest.mark.broad
def test_a_pin_may_hold_what_a_module_returns() -> None:
    case = resnet(torch.float64, batch=4, width=4)
    program = compiled(case.model, "cp=2", "cp: height\npin value:blocks.1: _, _, height!, _ only", case.call_kwargs, F.cross_entropy)
    check(program, case.call_kwargs)


def test_inference() -> None:
    model, x = UNet().double().eval(), images()["images"]
    program = meshc.compile(model, meshc.Mesh("cp=2"), args=(x,), plan="cp: height")
    assert meshc.verify(program, (x,)).worst < 1e-10


def test_names() -> None:
    program = compiled(UNet(), "cp=2", "cp: height", images(), F.cross_entropy)
    found = {row.split()[0]: row for row in str(program.factors()).splitlines() if row.strip()}
    assert "4, 8, 16" in found["height"] and "3, 6, 12" in found["width"]
    inputs = {"input": states()["input"][:, :3], "target": torch.zeros(4, 4, 6).double()}
    line = compiled(nn.Sequential(nn.Conv1d(3, 4, 3)), "cp=2", "cp: seq", inputs, F.mse_loss)
    rows = str(line.factors()).splitlines()
    assert any(row.split()[:2] == ["length", "seq"] and "6, 8" in row for row in rows), rows


def test_more_ranks_than_elements() -> None:
    """Three elements over five ranks: two have none."""
    inputs = states(3)
    check(compiled(nn.Sequential(CausalMixer()), "sp=5", "sp: seq", inputs, F.mse_loss), inputs)
