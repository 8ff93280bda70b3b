"""Importing meshc brings nothing that is large and not needed yet: it should take little longer than importing torch. Who takes a program
imports nothing that compiles one. What names meshc's operators registers them, whichever module is imported first."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.broad import broad

ROOT = Path(__file__).parents[1]

LARGE = ("scipy", "sympy", "tabulate", "transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "meshc.api")
NOT_FOR_COMPILING = ("scipy.optimize", "scipy.sparse", "transformers", "torch._dynamo", "torch._inductor")
COMPILES = ("meshc.passes.driver", "meshc.rules", "meshc.passes.partition", "meshc.check.consistency", "meshc.report.page")
SCRIPT = f"""
import sys
import torch
before = set(sys.modules)
import meshc
print([name for name in {LARGE!r} if name in sys.modules and name not in before])
print(meshc.Mesh("dp=2"), callable(meshc.compile), meshc.recipes.__name__, hasattr(meshc, "summry"))
print([name for name in {NOT_FOR_COMPILING!r} if name in sys.modules and name not in before])
print([name for name in {COMPILES!r} if name in sys.modules])
from meshc.text import allowed_operators
print([name for name in sorted(allowed_operators.OPERATORS) if name.startswith("meshc.") and allowed_operators._overload(name) is None])
"""


def test_importing_meshc_imports_nothing_large() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "dp=2 True meshc.recipes False", "[]", "[]", "[]"]


def naming_operators() -> list[str]:
    """Modules whose text has operators of the `meshc::` namespace."""
    files = [path for folder in ("meshc", "passes", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [path.relative_to(ROOT).with_suffix("") for path in files if "ops.meshc" in path.read_text()]
    return [".".join(path.parts if path.parts[0] == "meshc" else ("meshc", *path.parts)) for path in found]


def import_alone(module: str, names: list[str]) -> None:
    importlib.import_module(module)
    missing = [name for name in names if not hasattr(torch.ops.meshc, name)]
    assert not missing, missing


@pytest.mark.parametrize("module", [broad(name) for name in naming_operators()])
def test_what_names_operators_registers_them(module: str) -> None:
    """All that it names, in functions too."""
    text = (ROOT / Path(*module.split(".")[module.startswith(("meshc.passes", "meshc.runtime")) :])).with_suffix(".py").read_text()
    names = [one or other for one, other in re.findall(r"ops\.meshc\.([a-z]\w+)[.(]|(?<![\w.\"'`/])meshc\.([a-z]\w+)\.default", text)]
    child = multiprocessing.get_context("spawn").Process(target=import_alone, args=(module, names))
    child.start()
    child.join(120)
    assert child.exitcode == 0


UNUSED = (
    "ops.rnn", "ops.recurrence", "ops.delta_rule", "rules.pooling", "rules.convolution", "rules.routed_experts", "rules.fourier",
    "frontend.loop_reader", "passes.planner.plan_search", "passes.driver.choose", "text.program_diff",
)  # fmt: skip
COMPILE = f"""
import sys
import torch
import meshc
step = meshc.TrainStep(model := torch.nn.Linear(4, 4), optimizer=torch.optim.AdamW(model.parameters()), loss=torch.nn.functional.mse_loss)
meshc.compile(step, meshc.Mesh("dp=2"), args=(torch.ones(2, 4),), kwargs={{"target": torch.ones(2, 4)}})
print([name for name in {UNUSED!r} if f"meshc.{{name}}" in sys.modules])
"""


def test_compiling_imports_what_the_model_needs() -> None:
    """Families of operators, loops over experts, searches: what a plain model has none of."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
