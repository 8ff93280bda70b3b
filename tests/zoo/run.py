"""One cell of the zoo: a family on a mesh, as inference and as a training step, each against the model on one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from meshc.cost import divided_work
from meshc.program.program import PlainProgram
from tests.captured import Captured
from tests.models import Case
from tests.zoo.plain import PLAIN
from tests.zoo.stock import STOCK

MESHES: Final = ("tp=2", "tp=4", "dp=2,tp=2", "tp=3")
NAMES: Final = (*STOCK, *PLAIN)


def case(name: str) -> Case:
    """A family's model and inputs, the same on every call."""
    torch.manual_seed(1)
    return STOCK[name].case(name) if name in STOCK else PLAIN[name]()


@lru_cache(maxsize=2)
def captured(name: str, train: bool) -> Captured:
    return Captured(case(name), train=train, double=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an eps above the rounding of gradients that are zero in exact arithmetic (of the keys' biases), which Adam would blow up."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-6)


def inference(name: str, mesh: str) -> Captured:
    """Every output, in evaluation mode."""
    found = captured(name, False)
    found.verify_inference(mesh, None)
    return found


def training(name: str, mesh: str) -> Captured:
    """Loss and every gradient, then losses and updated parameters of two steps of AdamW."""
    found = captured(name, True)
    found.verify_training(mesh, None, adamw)
    return found


def run(name: str, mesh: str) -> dict[str, Any]:
    """A row of the table: what each kind of program came to, and what the training program is like. Errors are results too."""
    row: dict[str, Any] = {"name": name, "mesh": mesh}
    for kind, verify in (("inference", inference), ("training", training)):
        row[kind], found = outcome(verify, name, mesh)
        if found is not None:
            row.update(described(found.latest), seconds=round(found.seconds, 1))
    return row


def outcome(verify: Callable[[str, str], Captured], name: str, mesh: str) -> tuple[str, Captured | None]:
    try:
        return "ok", verify(name, mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None


def described(program: PlainProgram) -> dict[str, Any]:
    """Shares of the arithmetic that each axis splits (of all, of what has a legal split), and what runs whole for want of a rule."""
    rows = divided_work.work_rows(program) or []
    axes = [axis.name for axis in program.mesh.axes]
    whole = [note.partition(" has no rule")[0] for note in program.notes if "has no rule" in note]
    largest = {axis: [str(row) for row in divided_work.largest_whole(rows, axis)] for axis in axes}
    return {
        "share": {axis: divided_work.share(rows, axis) for axis in axes},
        "share_legal": {axis: divided_work.share(rows, axis, legal=True) for axis in axes},
        "largest_whole": {axis: found for axis, found in largest.items() if found},
        "whole": sorted(set(whole)),
    }


def first_line(error: str) -> str:
    """An error in one line of the table, without addresses and folders, and without what would break a table."""
    line = re.sub(r"(/[\w.+-]+)+/(?=[\w-]+\.py)", "", error.splitlines()[0])
    return re.sub(r"0x[0-9a-f]+", "0x...", line).replace("|", "/")[:160]
