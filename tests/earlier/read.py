"""What a rank of `test_earlier.py` does: goes on from each kind of saved state, and runs artifacts; values are those written down then."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

from meshc.runtime.saved.run_saved import RunRequest, run_saved
from meshc.runtime.saved_state import load_model
from tests.earlier.write import batches, compiled, decoder


def go_on(path: str) -> None:
    """The second step of `program` after each kind of state, another mesh's too."""
    folder = Path(path)
    dist.init_process_group("gloo")
    rows, wanted = batches(folder), json.loads((folder / "losses.json").read_text())["program"][1]
    trained = load_file(folder / "trained.safetensors")
    for name in ("program", "stored"):
        for kind in ("state", "state.pt"):
            model = decoder(folder)
            nn.init.zeros_(model.head.weight)
            program = compiled(model, name, rows[0])
            if kind == "state":
                state = program.state_dict()
                dcp.load(state, checkpoint_id=folder / kind)
            else:
                state = torch.load(folder / kind)
            program.load_state_dict(state)
            loss = program(rows[1]["ids"], target=rows[1]["target"])
            torch.testing.assert_close(loss.item(), wanted, rtol=1e-6, atol=0)
            whole = program.state_dict(full=True)
            if dist.get_rank() == 0:
                close(whole["model"], {key: value for key, value in trained.items() if key != "output"})
    dist.destroy_process_group()


def run_artifact(path: str, name: str, out: str) -> None:
    """An artifact by `meshc run`: both steps, or the call; `program` also from the folder of an earlier run's state."""
    folder = Path(path)
    files = tuple(str(folder / f"{file}.safetensors") for file in (("ids",) if name == "forward" else ("batch0", "batch1")))
    state = None
    if name == "folder":
        name, files, state = "program", files[1:], str(folder / name)
    run_saved(
        RunRequest(str(folder / name), files, out, state=state, save_state=None if name == "forward" else f"{out}/state")
    )


def check_outputs(folder: Path, name: str, out: Path) -> None:
    trained = load_file(folder / "trained.safetensors")
    if name == "forward":
        close(load_file(out / "outputs.safetensors"), {"output": trained["output"]})
        return
    losses = torch.tensor([row["loss"] for row in json.loads((out / "metrics.json").read_text())])
    wanted = torch.tensor(json.loads((folder / "losses.json").read_text())["program" if name == "folder" else name])
    torch.testing.assert_close(losses, wanted[1:] if name == "folder" else wanted, rtol=1e-6, atol=0)
    close(load_model(out / "state"), {key: value for key, value in trained.items() if key != "output"})


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
