"""The text of a small compilation before and after a pass, for tests of that pass.

    before, after = around("inline", model, "dp=2", x=torch.randn(4, 3))
    changed(before, after)          the lines that went, and those that came

Texts are those that MESHC_DUMP asks a compilation for, without comments.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

import meshc
from meshc import environment


def steps(
    what: nn.Module | meshc.TrainStep,
    mesh: str,
    plan: Any = None,
    options: meshc.Options | None = None,
    backend: str = "eager",
    **inputs: Tensor,
) -> dict[str, str]:
    """Pass -> text after it, in the order of passes; `source` is what comes before the first."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {environment.DUMP: folder}):
        meshc.compile(what, meshc.Mesh(mesh), kwargs=inputs, plan=plan, backend=backend, options=options or meshc.Options())
        files = sorted(Path(folder).glob("*.py"))
        return {file.stem.split("_", 1)[1]: plain(file.read_text()) for file in files}


def around(name: str, what: nn.Module | meshc.TrainStep, mesh: str, plan: Any = None, **ask: Any) -> tuple[str, str]:
    """The text before and after the pass `name`."""
    texts = steps(what, mesh, plan, **ask)
    before = list(texts)[list(texts).index(name) - 1]
    return texts[before], texts[name]


def plain(text: str) -> str:
    """A dump's text from its first function on, without comments and empty lines."""
    lines = (re.sub(r"  # .*", "", line) for line in text.splitlines())
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith("# ")]
    first = next(index for index, line in enumerate(kept) if line.startswith(("def ", "@ranks", "@sizes")))
    return "\n".join(kept[first:]) + "\n"


def body(text: str, function: str | None = None) -> str:
    """The assignments and results of a text, or of one of its functions, without its parameters."""
    if function is not None:
        text = text[text.index(f"def {function}(") :]
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.rstrip().endswith("):"))
    end = next((index for index, line in enumerate(lines[start + 1 :], start + 1) if not line.startswith("    ")), len(lines))
    return "\n".join(line.removeprefix("    ") for line in lines[start + 1 : end]) + "\n"


def changed(before: str, after: str) -> str:
    """Lines that the pass took away (-) and wrote (+), in their order; empty if the text is the same."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "".join(f"{line[0]} {line[1:].strip()}\n" for line in lines if not line.startswith(("---", "+++", "@@")))
