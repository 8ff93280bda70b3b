"""Pages are alive: every file that they name is there, every command can be given, every block of Python is Python.

What a block does is tested where its subject is (`tests/pipelining/test_page.py`, for one); here it must compile and import what exists.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from meshc.__main__ import _parser
from tests import reference
from tests.coverage_page import left_alone

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PLACES = ("", "meshc", "meshc/passes", "meshc/runtime", "docs")
"""Where a page may begin when it names a file."""
FOLDERS = {folder.name for top in ("meshc", "passes", "runtime", "tests", "docs", "examples", "bench")
           for folder in [ROOT / top, *(ROOT / top).rglob("*/")]}  # fmt: skip
MADE_UP = {"tests/passes/lower/test_transposes.py", "passes/lower/transposes.py", "meshc/devices.toml"}
"""What docs/add-a-pass.md lets its reader write, and a file among a user's settings."""
PROGRAM = re.compile(r': "\w+\[|\breturn \{|^schedule = \[')
"""Part of a program's text."""

SPAN = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = {name for action in _parser()._actions if isinstance(action, argparse._SubParsersAction) for name in action.choices}


def named_files(page: str) -> Iterator[str]:
    """Paths with a folder that stand in backquotes: `docs/plans.md`, `passes/rules/`."""
    for span in SPAN.findall(BLOCK.sub("", page)):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and span.partition("/")[0] in FOLDERS and re.search(r"\.(py|md|txt|toml)$|/$", span):
            yield span


def commands(page: str) -> Iterator[tuple[str, str]]:
    """(make, target) or (-m, module), wherever they stand."""
    yield from (("make", target) for target in re.findall(r"`make ([a-z][\w-]*)", page.replace("\n", " ")))
    yield from (("-m", module.rstrip(".")) for module in re.findall(r"python[\d.]* -m ([A-Za-z_][\w.]*)", page))
    yield from (("meshc", name) for name in re.findall(r"(?:-m meshc|`meshc) ([a-z]+)\b", page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    names = set(named_files(page.read_text())) - MADE_UP
    missing = sorted(name for name in names if not any((ROOT / place / name).exists() for place in PLACES))
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_gives_can_be_given(page: Path) -> None:
    for kind, name in set(commands(page.read_text())):
        if kind == "make":
            assert name in TARGETS, f"make {name}"
        elif kind == "meshc":
            assert name in COMMANDS, f"meshc {name}"
        else:
            assert importlib.util.find_spec(name) is not None, f"python -m {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_compiles_and_imports_what_is_there(page: Path) -> None:
    for kind, block in BLOCK.findall(page.read_text()):
        if kind != "python" or PROGRAM.search(block) and "import" not in block:
            continue
        block = textwrap.dedent(block)
        try:
            tree = ast.parse(block)
        except SyntaxError:
            tree = ast.parse(f"{{\n{block}}}")  # an entry of a table
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshc") and "transposes" not in str(node.module):
                module = importlib.import_module(node.module or "")
                gone = [a.name for a in node.names if not hasattr(module, a.name) and _absent(f"{node.module}.{a.name}")]
                assert gone == [], f"{node.module} has no {', '.join(gone)}"


def _absent(module: str) -> bool:
    return importlib.util.find_spec(module) is None


def test_a_dead_name_is_found() -> None:
    page = "See `meshc/nothing.py` and `docs/plans.md`, run `make nothing`, `python -m tests.nothing`, `meshc nothing`."
    assert list(named_files(page)) == ["meshc/nothing.py", "docs/plans.md"]
    assert set(commands(page)) == {("make", "nothing"), ("-m", "tests.nothing"), ("meshc", "nothing")}


RUNS = [([], 0, False), (["--only", "a"], 0, True), ([], 3, True), (["--limit-seconds", "3"], 0, False)]


@pytest.mark.parametrize("words, missing, alone", RUNS)
def test_a_partial_run_leaves_the_page_alone(words: list[str], missing: int, alone: bool, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    assert left_alone(parser, parser.parse_args(words), missing) is alone
    assert ("is as it was" in capsys.readouterr().out) is alone


def test_the_pass_of_the_page_passes_its_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/add-a-pass.md: the file and its test, as a reader would write them; the place that it is given in the list is there."""
    page = (ROOT / "docs" / "add-a-pass.md").read_text()
    written, place, test = (block for kind, block in BLOCK.findall(page) if kind == "python")
    module = ModuleType("meshc.passes.lower.transposes")
    exec(written, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(test, names := {})
    tests = [function for name, function in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for function in tests:
        function()
    assert place.strip().splitlines()[1].strip() in (ROOT / "passes" / "driver" / "pipeline.py").read_text()


def test_the_spine_has_the_lengths_that_the_page_says() -> None:
    rows = re.findall(r"^\| `(\S+\.py)` \| (\d+) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    lengths = {file: (int(told), len((ROOT / file).read_text().splitlines())) for file, told in rows}
    assert {file: both for file, both in lengths.items() if not 0.8 <= both[0] / both[1] <= 1.25} == {}


def test_the_page_on_tests_names_what_make_test_leaves_out() -> None:
    page = (ROOT / "docs/tests.md").read_text()
    told = set(re.findall(r"^\| `(tests/[\w/]+\.py)` \|", page, re.MULTILINE))
    ways = ("from tests.broad import " + "broad", "pytest.mark." + "broad")
    files = (ROOT / "tests").rglob("test_*.py")
    assert told == {str(file.relative_to(ROOT)) for file in files if any(way in file.read_text() for way in ways)}


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert reference.PAGE.read_text() == reference.page(), "make reference"


def test_the_site_has_every_page() -> None:
    told = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
