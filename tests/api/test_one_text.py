"""One text in every process: ranks that compile for themselves run the same program, whatever else their processes have and have done."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.ir.mesh import Mesh
from meshc.text.printer import hash_program, print_program
from tests.broad import broad
from tests.golden import cases
from tests.passes.depth import stacks

CHILD = """
import sys
for name in {imports!r}:
    __import__(name)
from {package} import {module}
from meshc.text.printer import print_program
sys.stdout.write("\\0".join(print_program(eval(case).compiled, comments=False) for case in {cases!r}))
"""
EXTRA = """
import enum, types
from torch.utils import _pytree
import torch.nn.functional as F

class Kind(enum.Enum):
    AUTO = "auto"

class Box:
    def __init__(self, *items): self.items = items

_pytree.register_pytree_node(Box, lambda box: (list(box.items), None), lambda items, _: Box(*items))
SEEN = {Kind.AUTO, types.SimpleNamespace, Box}
"""
"""As libraries of tensor classes do when they are imported."""
IMPORTS = ["extra_of_tensors", "transformers", "torch.distributed.tensor", "meshc.runtime", "meshc.passes.planner.plan_search", "meshc"]
RANK = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "PYTHONHASHSEED": "271"}
SEARCHED = "stacks.compiled(stacks.Stack([16] * 2, dropout=0.1), 'pp=2,dp_shard=2', microbatches=2, clip_grad_norm=1.0)"
GOLDEN = [f"cases.CASES[{name!r}]()" for name in cases.CASES]


def texts_of_another_rank(module: Any, calls: list[str], extras: Path) -> list[str]:
    """Of what these calls of the module compile, in a process that begins with these imports, in the environment of that rank."""
    found = [str(extras), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **RANK, "PYTHONPATH": os.pathsep.join(filter(None, found)), "OMP_NUM_THREADS": "1"}
    package, _, name = module.__name__.rpartition(".")
    code = CHILD.format(imports=IMPORTS, package=package, module=name, cases=calls)
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.split("\0")


@pytest.mark.parametrize("module, calls", [(stacks, [SEARCHED]), broad(cases, GOLDEN)], ids=["few", "rest"])
def test_processes_compile_one_text(module: Any, calls: list[str], tmp_path: Path) -> None:
    """In a process that has compiled other programs, and in one that begins with this one."""
    (tmp_path / "extra_of_tensors.py").write_text(EXTRA)
    one = [print_program(eval(call).compiled, comments=False) for call in calls]
    other = texts_of_another_rank(module, calls, tmp_path)
    assert len(one) == len(calls) and all(text.startswith("mesh = ") for text in one)
    for name, here, there in zip(calls, one, other, strict=True):
        assert here == there, name


class Constants(nn.Module):
    """Twelve tensors that are made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(12):
            x = x * torch.tensor(1.0 + number)
        found: Tensor = self.linear(x)
        return found


def test_a_program_that_another_rank_has_made_is_the_same_one() -> None:
    """Of its constants, too, which a file gives back in any order."""
    with torch.no_grad():
        program = meshc.compile(Constants(), Mesh("dp=2"), args=(torch.ones(4, 4),)).compiled
    assert len(program.constants) == 12
    made: Any = importlib.import_module("meshc.api.compilation_result")
    data = made.pack_program(program)
    taken = [made.unpack_program(data, program.mesh)[0] for _ in range(8)]
    assert {hash_program(one) for one in taken} == {hash_program(program)}
