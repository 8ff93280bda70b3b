"""What a user's type checker knows of meshc: calls that are right pass strictly, and wrong ones do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshc

ROOT = Path(meshc.__file__).resolve().parents[1]
SCRIPT = '''
import torch
from torch import nn

import meshc


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


model = nn.Linear(4, 4)
step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=mean, clip_grad_norm=1.0)
mesh = meshc.Mesh("dp=2")
program = meshc.compile(step, mesh, plan="zero1", options=meshc.Options(seed=0, remat="cheap"))
reveal_type(program)
reveal_type(program.summary())
reveal_type(program.metrics)
reveal_type(meshc.verify(program, dtype=torch.float64).ok)
reveal_type(meshc.Plan("dp: batch"))
program.init_weights()
program.init_weights(lambda whole: nn.init.zeros_(whole.get_parameter("weight")))
meshc.init_weights(model, seed=3)
meshc.load_pretrained(program, "folder", adapter="default")
program.save_pretrained("folder")
program.load_state_dict(program.state_dict(full=True))
rate: float = program.metrics["lr"][0]
print(program.metrics["loss"].item(), program.state_dict(full=True)["model"]["weight"].norm(), rate)

meshc.compile(step)
meshc.Options(sed=0)
meshc.Mesh(2)
meshc.TrainStep(model, loss=mean)
program.init_weights(3)
program.summry()
meshc.init_weights(program)
'''
REVEALED = ["meshc.api.handle.Program", "str", "dict[str, Any]", "bool", "meshc.plan.plan.Plan"]
WRONG = ["call-arg", "call-arg", "arg-type", "call-arg", "arg-type", "attr-defined", "arg-type"]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "meshc" / "py.typed").is_file()


@pytest.mark.broad
def test_a_users_script_is_checked_strictly(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "script.py"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True, timeout=280)
    lines = [line for line in done.stdout.splitlines() if line.startswith("script.py")]
    assert re.findall(r'Revealed type is "([^"]+)"', done.stdout.replace("builtins.", "")) == REVEALED, done.stdout
    first_wrong = SCRIPT.splitlines().index("meshc.compile(step)") + 1
    errors = [re.fullmatch(r"script\.py:(\d+): error: .*\[([\w-]+)\]", line) for line in lines if ": error: " in line]
    wanted = [(first_wrong + at, kind) for at, kind in enumerate(WRONG)]
    assert [(int(found[1]), found[2]) for found in errors if found] == wanted, done.stdout
