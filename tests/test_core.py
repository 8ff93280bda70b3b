"""The core that a reader meets: tokens of all modules that a first compilation imports, and where imports may stand in functions."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final, get_type_hints

import pytest

from meshc.passes import pipeline
from meshc.passes.phases.compiler_pass import Pass
from tests.test_layout import modules

MOST: Final = 612_000
"""Tokens, docstrings and comments aside. What grows beyond it is imported where it is not needed, or belongs into less code."""

COMPILED: Final = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import meshc
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()))
ids = torch.randint(64, (8, 16))
meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs={"input_ids": ids, "labels": ids})
files = {module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "meshc"}
print(*sorted(filter(None, files)), sep="\\n")
"""

IN_FUNCTIONS: Final = ("meshc.passes.pipeline", "meshc.commands", "meshc.__main__", "meshc.lazy_module")
"""The list of passes, the table of commands, and the one mechanism for modules that are imported when an attribute of theirs is read."""


def tokens(text: str) -> int:
    """Tokens of a module, without docstrings, comments, line ends and indents."""
    docs = {
        node.body[0].value.lineno for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None
        and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    return sum(
        each.type not in layout and not (each.type == tokenize.STRING and each.start[0] in docs)
        for each in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def test_tokens_are_those_of_the_code_alone() -> None:
    assert tokens('"""About it."""\n\nx = 1  # one\n') == 3
    assert tokens('def f(a):\n    """About it."""\n    return a\n') == 8


@pytest.mark.processes
def test_a_first_compilation_imports_a_core_that_one_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    """A two-layer Llama's training step by its roles' recipe on `dp=2,tp=2`, in a process of its own."""
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED], capture_output=True, text=True, timeout=280, check=True).stdout
    files = [Path(line) for line in out.splitlines()]
    count = sum(tokens(file.read_text()) for file in files)
    with capsys.disabled():
        print(f"\ncore: {count:,} tokens in {len(files)} modules of {sum(1 for _ in modules())}")
    assert len(files) > 300
    assert count <= MOST
    rooms = {"/".join(file.parts[-2:]) for file in files}
    assert not {"planner/plan_search.py", "driver/choose.py", "stages/cut_stages.py", "memory/offload.py", "run/inductor.py"} & rooms


def inner_imports(source: str) -> Iterator[str]:
    if not re.search(r"^(?!from|import).*\b(from|import)\b.*\bmeshc\b", source, re.M):
        return  # parsing seven hundred files takes two seconds
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "meshc" and node.module != "meshc.private":
                    yield str(node.module)
                if isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "meshc")


def test_imports_of_meshcs_own_stand_in_functions_of_the_lists_alone() -> None:
    """`meshc.private` imports names of other libraries when they are read, which a function may do."""
    found = {
        name: imports for name, file in modules()
        if not name.startswith(IN_FUNCTIONS) and (imports := sorted(set(inner_imports(file.read_text()))))
    }  # fmt: skip
    assert found == {}
    assert list(inner_imports("def f():\n    from meshc.ir import mesh\n    import meshc.ops\n")) == ["meshc.ir", "meshc.ops"]
    assert list(inner_imports("def f(): import os, meshc\n")) == ["meshc"]


def late_modules(source: str, known: set[str]) -> list[str]:
    """Names of modules that a module imports for type checkers alone."""
    blocks = [
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and node.orelse
    ]
    imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
    return [alias.asname or alias.name for node in imports for alias in node.names if f"{node.module}.{alias.name}" in known]


def test_what_is_imported_late_has_the_name_by_which_it_is_read() -> None:
    """A type checker sees the one, a call the other."""
    files = {name: file.read_text() for name, file in modules()}
    late = {name: found for name, text in files.items() if "LazyModule(" in text and (found := late_modules(text, set(files)))}
    assert len(late) > 5 and "explanation" in late["meshc.api.handle"]
    assert [(name, one) for name, found in late.items() for one in found if one not in vars(import_module(name))] == []


VALUES: Final = [each for value in vars(pipeline).values() for each in (value if isinstance(value, tuple) else [value])]
LISTED: Final = [each for each in VALUES if isinstance(each, Pass)]


@pytest.mark.parametrize("each", {one.name: one for one in LISTED}.values(), ids=lambda each: each.name)
def test_each_pass_of_the_list_is_a_function_of_one_phase(each: Pass) -> None:
    """Which is imported by its name when it first runs."""
    module, _, name = each.run.__name__.partition(":")
    function = getattr(import_module(f"meshc.passes.{module}"), name)
    hints = get_type_hints(function)
    assert hints.pop("return").__name__ in ("TracedModel", "PlacedModel", "LoweredProgram")
    assert len(hints) == 1
