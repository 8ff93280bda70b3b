"""Several optimizers in one step on real ranks: wrappers and lists, their schedulers, state dicts, checkpoints and saved programs."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

import meshc
from meshc import artifact
from meshc.cost.peak_memory import peak_rank
from meshc.runtime.failure.failed_rank import world_board
from meshc.runtime.saved.loaded_program import LoadedProgram
from tests.models import mlp
from tests.optimizer.others import Orthogonal
from tests.processes.live_bytes import LiveBytes
from tests.processes.reference import close, furthest
from tests.processes.session import device_mesh, run_checks
from tests.wrappers import WRAPPERS, Listed

STEPS = 3


def _optimizers(given: Any) -> list[torch.optim.Optimizer]:
    return list(meshc.TrainStep(nn.Linear(1, 1), optimizer=given).optimizers.members)


def _halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def _alone(model: nn.Module, steps: int) -> tuple[list[float], nn.Module, list[torch.optim.Optimizer]]:
    """Plain torch, with a scheduler on the second optimizer."""
    case, twin = mlp(torch.float64), copy.deepcopy(model)
    both = Listed(twin)
    scheduler = _halved(both.ones[1])
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(twin(**case.kwargs), case.target_kwargs["target"])
        loss.backward()
        both.step()
        twin.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, twin, both.ones


def _train(mesh: Any, given: Any, model: nn.Module, plan: str | None = None) -> meshc.Program:
    step = meshc.TrainStep(model, optimizer=given, loss=F.cross_entropy)
    return meshc.compile(step, mesh, kwargs=mlp(torch.float64).call_kwargs, plan=plan)


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def trained(mesh: Any) -> None:
    """Losses, parameters and the inner optimizers' state are plain torch's, with a scheduler on one of them, and nothing compiles again."""
    case = mlp(torch.float64)
    for name, build in WRAPPERS.items():
        model = copy.deepcopy(case.model)
        wanted, twin, theirs = _alone(model, STEPS)
        given = build(model)
        program = _train(mesh, given, model, "fsdp" if name == "chained" else None)
        mine = _optimizers(given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler = _halved(mine[1])
            losses = []
            for step in range(STEPS):
                losses.append(program(case.kwargs["x"], case.target_kwargs["target"]).item())
                close(program.metrics["lr"], [0.02, 1e-2 * 0.5**step], 1e-12)
                scheduler.step()
        close(losses, wanted, 1e-9)
        assert furthest(_whole(model), _whole(twin))[0] < 1e-9, name
        assert len(program.compilations.kept) == 1
        for one, other in zip(mine, theirs, strict=True):
            state, reference = one.state_dict()["state"], other.state_dict()["state"]
            assert state.keys() == reference.keys()
            for index, slots in reference.items():
                for slot, value in slots.items():
                    found = state[index][slot]
                    split = name == "chained" and slot != "step"
                    assert isinstance(found, DTensor) == split, (name, slot)
                    torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, value)
        if hasattr(given, "param_groups"):
            live = {id(p) for p in model.parameters()}
            assert {id(p) for group in given.param_groups for p in group["params"]} == live


def resumed(mesh: Any) -> None:
    """A checkpoint of both optimizers, by name, goes on under another mesh and through another wrapper; so does what torch writes."""
    case = mlp(torch.float64)
    start = copy.deepcopy(case.model)
    wanted, twin, _ = _alone(start, STEPS + 1)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    model = copy.deepcopy(start)
    given = WRAPPERS["own groups"](model)
    program = _train(mesh, given, model)
    scheduler = _halved(_optimizers(given)[1])
    for _ in range(STEPS):
        program(**case.call_kwargs)
        scheduler.step()
    path = Path(folder[0])
    dcp.save({"program": program}, checkpoint_id=path / "program")
    parameters, optim = get_state_dict(model, _optimizers(given))
    dcp.save({"program": {"model": parameters, "optim": optim}}, checkpoint_id=path / "plain")
    for kind in ("program", "plain"):
        again = copy.deepcopy(start)
        for parameter in again.parameters():
            nn.init.normal_(parameter)
        other = _train(device_mesh("tp=2"), WRAPPERS["list"](again), again)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = other.state_dict()
            state = state if kind == "program" else {name: state[name] for name in ("model", "optim")}
            dcp.load({"program": state}, checkpoint_id=path / kind)
            other.load_state_dict(state)
        close([other(**case.call_kwargs).item()], wanted[STEPS:], 1e-9)
        assert furthest(_whole(again), _whole(twin))[0] < 1e-9, kind
        assert other.metrics["lr"] == [0.02, 1e-2 * 0.5**STEPS]


def saved(mesh: Any) -> None:
    """A saved program steps both, without the model: constant rates, since it holds the numbers of when it was saved."""
    case = mlp(torch.float64)
    model = copy.deepcopy(case.model)
    wanted = []
    twin = copy.deepcopy(model)
    both = Listed(twin)
    for _ in range(STEPS):
        loss = F.cross_entropy(twin(**case.kwargs), case.target_kwargs["target"])
        loss.backward()
        both.step()
        twin.zero_grad()
        wanted.append(loss.item())
    program = _train(mesh, WRAPPERS["chained"](model), model, "fsdp")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    program.save(Path(folder[0]) / "saved")
    read = artifact.load(Path(folder[0]) / "saved")
    with artifact.open_weights(Path(folder[0]) / "saved") as weights:
        loaded = LoadedProgram(read, weights, dist.get_rank(), torch.device("cpu"), world_board())
    sharded = {port.name: port for port in read.inputs if port.kind == "input"}
    inputs = {sharded[name].key: value for name, value in case.call_kwargs.items()}
    close([float(loaded.run(inputs)["output:output"]) for _ in range(STEPS)], wanted, 1e-9)
    assert loaded.learning_rates() == [0.02, 0.01]


def divided(mesh: Any) -> None:
    """Matrices of equal layers, each updated by one rank, stored in tiles and whole: what is trained, and what a step holds."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(4)))
    x, y = torch.randn(2, 192), torch.randn(2, 192)
    twin = copy.deepcopy(layers)
    theirs = Orthogonal(twin.parameters())
    for _ in range(STEPS):
        F.mse_loss(twin(x), y).backward()
        theirs.step()
        twin.zero_grad()
    for plan in (None, "fsdp"):
        model = copy.deepcopy(layers)
        step = meshc.TrainStep(model, optimizer=Orthogonal(model.parameters()), loss=F.mse_loss)
        program = meshc.compile(step, mesh, args=(x,), kwargs={"target": y}, plan=plan)
        assert any("4 of 4 computations are divided over the ranks of dp" in note for note in program.compiled.notes)
        peaks = []
        for _ in range(STEPS):
            with LiveBytes() as live:
                program(x, target=y)
            peaks.append(live.peak)  # gloo's threads let go of what they have sent a little late, now and then
        bucket = sum(p.nbytes for p in twin.parameters()) if plan is None else 0  # of gradients: it was there before the step
        ratio = (min(peaks) + bucket) / peak_rank(program.compiled).peak.total
        assert 0.99 < ratio < 1.01, (plan, ratio)
        assert furthest(_whole(model), _whole(twin))[0] < 1e-4, plan


def run(mesh: str, *names: str) -> None:
    run_checks((trained, resumed, saved, divided), mesh, names)
