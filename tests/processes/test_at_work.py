"""`meshc run --rebalance-every N`: experts of a saved program move between calls, and nothing else changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import meshc
from meshc.runtime.saved.run_saved import RunRequest, run_saved
from tests.broad import broad
from tests.processes.at_work import CALLS
from tests.runtime.launch import launch
from tests.zoo.experts import FAMILIES, shallow

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


@pytest.mark.parametrize(
    "mesh, ranks, copies", [broad("ep=2", 2, 0), broad("dp_shard=2,ep=2", 4, 0), broad("pp=2,ep=2", 4, 0), broad("ep=2", 2, 1)]
)
def test_losses_and_states_are_one_devices(mesh: str, ranks: int, copies: int, tmp_path: Path) -> None:
    """Two runs, the second from the first one's state, with experts that move after a call: losses are the model's own, and so are the
    parameters that are left."""
    found = FAMILIES["mixtral"].case("mixtral")
    found.model.double()
    with torch.no_grad():
        for layer in LAYERS:  # experts 0 and 1 are everybody's, and lie on one rank
            found.model.get_parameter(layer.replace("experts", "gate.weight"))[2:] = 0.0
    twin = copy.deepcopy(found.model)
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(found.model, optimizer=optimizer, loss=lambda output: output.loss)
    options = meshc.Options(experts=meshc.Experts(placement="movable", copies=copies), seed=0)
    meshc.compile(step, meshc.Mesh(mesh), kwargs=found.call_kwargs, options=options).save(tmp_path / "program")
    inputs = {name: x for name, x in found.call_kwargs.items() if isinstance(x, torch.Tensor)}
    safetensors.torch.save_file(inputs, tmp_path / "batch.safetensors")
    losses, theirs = [], torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-6)
    twin.config._experts_implementation = "eager"  # type: ignore[union-attr]  # torch's products of runs know no float64
    for _ in range(2 * CALLS):
        loss = twin(**found.call_kwargs).loss
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        losses.append(loss.item())
    rows = []
    for part in ("0", "1"):
        ended = launch("tests.processes.at_work:run", str(tmp_path), part, ranks=ranks, timeout_s=400)
        assert ended.ok, ended
        assert "experts, by what the busiest rank has in multiples of the mean: moved in" in ended.ranks[0].out
        rows += json.loads((tmp_path / f"out_{part}" / "metrics.json").read_text())
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6)
    _same(tmp_path / "state_1", twin)


def _same(folder: Path, twin: torch.nn.Module) -> None:
    """A state has experts in the model's order, in the files of the ranks that hold them."""
    from meshc.runtime.saved.checkpoint_folder import SavedState

    with SavedState(str(folder)) as state:
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(state.tile(f"parameter:{name}", None, {}, {}), parameter.detach(), rtol=1e-5, atol=2e-6, msg=name)


def test_a_program_whose_experts_stay_is_refused(tmp_path: Path) -> None:
    found = shallow("mixtral")
    step = meshc.TrainStep(found.model, optimizer=torch.optim.SGD(found.model.parameters()), loss=lambda output: output.loss)
    path = tmp_path / "program"
    inputs = {name: x for name, x in found.call_kwargs.items() if isinstance(x, torch.Tensor)}
    safetensors.torch.save_file(inputs, tmp_path / "batch.safetensors")
    for options, said in (
        (meshc.Options(), "the experts of .* stay where they are"),
        (meshc.Options(experts=meshc.Experts(placement="movable")), "no axis of the mesh ep=1 splits the experts"),
    ):
        meshc.compile(step, meshc.Mesh("ep=1"), kwargs=found.call_kwargs, options=options).save(path)
        with pytest.raises(meshc.StateError, match=said):
            run_saved(RunRequest(str(path), (str(tmp_path / "batch.safetensors"),) * 2, str(tmp_path / "out"), rebalance_every=1))
    with pytest.raises(meshc.InputError, match="--rebalance-every 0: a number of calls, 1 or more"):
        run_saved(RunRequest(str(path), (str(tmp_path / "batch.safetensors"),), str(tmp_path / "out"), rebalance_every=0))
