"""Importing meshc brings nothing that is large and not needed yet: it should take little longer than importing torch."""

from __future__ import annotations

import subprocess
import sys

LARGE = ("scipy", "sympy", "tabulate", "transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "meshc.api")
NOT_FOR_COMPILING = ("scipy.optimize", "scipy.sparse", "transformers", "torch._dynamo", "torch._inductor")
SCRIPT = f"""
import sys
import torch
before = set(sys.modules)
import meshc
print([name for name in {LARGE!r} if name in sys.modules and name not in before])
print(meshc.Mesh("dp=2"), callable(meshc.compile), meshc.recipes.__name__, hasattr(meshc, "summry"))
print([name for name in {NOT_FOR_COMPILING!r} if name in sys.modules and name not in before])
"""


def test_importing_meshc_imports_nothing_large() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "dp=2 True meshc.recipes False", "[]"]
