"""Whose a line is: of libraries whose names begin with torch's, or that lie in a folder called so, it is their user's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshc
from meshc import frames
from meshc.errors import CaptureError
from meshc.runtime.failure import peers
from meshc.runtime.failure.peers import users_line

LIBRARY = """
import torch
from torch import nn

class Total(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.total = nn.Linear(3, 3), torch.zeros(())

    def forward(self, x):
        out = self.linear(x)
        self.total = self.total + out.detach().sum()
        return out

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x

class Counts(nn.Module):
    def forward(self, x):
        return torch.poisson(x.abs())

def wait(event, there):
    there.set()
    event.wait()
"""
PLACES = ("torch{}", "{}/torch", "{}/transformers")
"""Beside torch's own folder, and in folders of others that are called like torch and transformers."""


@pytest.fixture(params=range(len(PLACES)))
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A package whose code lies at one of PLACES."""
    name = PLACES[request.param].format(f"something{request.param}")
    folder = tmp_path / "site-packages" / name
    folder.mkdir(parents=True)
    (folder / "metric.py").write_text(LIBRARY)
    for each in (folder, *folder.parents):
        if each == tmp_path / "site-packages":
            break
        (each / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    module = f"{name.replace('/', '.')}.metric"
    __import__(module)
    yield sys.modules[module]
    del sys.modules[module]


def test_what_a_librarys_forward_keeps_is_told(library: Any) -> None:
    """A total that a step would have left at 0 in silence, as one of torchmetrics."""
    with pytest.warns(UserWarning, match=r"changes Python values, and a program leaves that out[\s\S]*metric\.py:12"):
        meshc.compile(library.Total(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3),))


def test_refusals_name_a_librarys_line(library: Any) -> None:
    with pytest.raises(CaptureError, match=r"metric\.py:21"):
        meshc.compile(library.Branch(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3),))
    with pytest.raises(meshc.errors.CompileError, match=r"metric\.py:25"):
        meshc.compile(library.Counts(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3),))


def test_torch_and_python_are_nobodys() -> None:
    assert not frames.is_users(nn.functional.__file__) and not frames.is_users(threading.__file__) and not frames.is_users(frames.__file__)
    of_torch, of_meshc = (Path(package.__file__ or "").parent for package in (torch, meshc))
    for like in (f"{of_torch}vision/ops/boxes.py", "/home/me/torch/train.py", f"{of_meshc}_runs/train.py"):
        assert frames.is_users(like)


def test_a_rank_tells_its_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the main thread is at, in code of its user's; of an installed package where there is none."""

    def told_in(file: str) -> Any:
        scope: dict[str, Any] = {}
        exec(compile("def evaluate(ask):\n    return ask()\n", file, "exec"), scope)
        return scope["evaluate"](users_line)

    assert told_in(f"{Path(meshc.__file__).parent}_runs/loop.py") == told_in("/home/me/torch/loop.py") == "evaluate (loop.py:2)"
    installed = f"{Path(torch.__file__).parents[1]}/torchsomething/loop.py"
    assert told_in(installed).startswith("told_in (test_frames.py:")
    monkeypatch.setattr(peers, "is_installed", lambda file: True)
    assert told_in(installed) == "evaluate (loop.py:2)"
