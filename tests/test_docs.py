"""Pages are alive: every file, command, option, call and block that they name is there.

Their Python runs in `tests/processes/test_pages.py`; here it must compile and import what exists.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import meshc
from meshc.options import GROUPS
from tests import reference
from tests.coverage_page import left_alone
from tests.shell_lines import BLOCK, faults, lines, spans

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
OPTIONS = ("Options", *(kind.__name__ for kind in GROUPS.values()))
"""Options, and what groups them."""
WRITTEN = [page for page in PAGES if page.name != "files.md"]
"""Those that are no list of other texts' first lines."""
PLACES = ("", "meshc", "meshc/passes", "meshc/runtime", "docs")
"""Where a page may begin when it names a file."""
FOLDERS = {folder.name for top in ("meshc", "passes", "runtime", "tests", "docs", "examples", "bench")
           for folder in [ROOT / top, *(ROOT / top).rglob("*/")]}  # fmt: skip
MADE_UP = {"tests/passes/lower/test_transposes.py", "passes/lower/transposes.py", "meshc/devices.toml"}
"""What docs/add-a-pass.md lets its reader write, and a file among a user's settings."""
SPAN = re.compile(r"`([^`\n]+)`")


def named_files(page: str) -> Iterator[str]:
    """Paths with a folder that stand in backquotes: `docs/plans.md`, `meshc/rules/`."""
    for span in SPAN.findall(BLOCK.sub("", page)):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and span.partition("/")[0] in FOLDERS and re.search(r"\.(py|md|txt|toml)$|/$", span):
            yield span


def calls(page: str) -> Iterator[tuple[str, str]]:
    """(`Options` or one of its groups, field), (`program`, attribute), (`meshc`, name), as they stand between backquotes and in blocks of
    Python."""
    text = "\n".join([*SPAN.findall(BLOCK.sub("", page)), *(block for kind, block in BLOCK.findall(page) if kind == "python")])
    for found in re.finditer(rf"(?<!\w)({'|'.join(OPTIONS)})\(", text):
        given = text[found.end() :]
        while (inner := re.sub(r"\([^()]*\)", "", given)) != given:
            given = inner
        yield from ((found[1], field) for field in re.findall(r"(?:^|, |\n)\s*(\w+)=", given.partition(")")[0]))
    yield from (("program", name) for name in re.findall(r"\bprogram\.(\w+)\(", text))
    yield from (("meshc", name) for name in re.findall(r"\bmeshc\.(\w+)\(", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    names = set(named_files(page.read_text())) - MADE_UP
    missing = sorted(name for name in names if not any((ROOT / place / name).exists() for place in PLACES))
    assert missing == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_command_that_a_page_gives_can_be_given(page: Path) -> None:
    text = page.read_text()
    wrong = {line: faults(line) for line in lines(text)} | {span: faults(span, partly=True) for span in spans(text)}
    assert {line: found for line, found in wrong.items() if found} == {}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_every_option_and_call_that_a_page_names_is_there(page: Path) -> None:
    there = {
        **{kind: {field.name for field in dataclasses.fields(getattr(meshc, kind))} for kind in OPTIONS},
        "program": set(dir(meshc.Program)),
        "meshc": {name for _, name in calls(page.read_text()) if hasattr(meshc, name) or hasattr(torch.ops.meshc, name)},
    }
    assert [(of, name) for of, name in calls(page.read_text()) if name not in there[of]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_compiles_and_imports_what_is_there(page: Path) -> None:
    for kind, block in BLOCK.findall(page.read_text()):
        if kind != "python":
            continue
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
    page = "See `meshc/nothing.py` and `docs/plans.md`, run `make nothing`, set `Options(seed=0, nothing=1)` and "
    page += "`Options(experts=Experts(bound=f(2), none=1))`, ask `program.nothing()`."
    assert list(named_files(page)) == ["meshc/nothing.py", "docs/plans.md"]
    assert list(spans(page)) == ["make nothing"]
    assert list(calls(page)) == [
        *(("Options", name) for name in ("seed", "nothing", "experts")), ("Experts", "bound"), ("Experts", "none"), ("program", "nothing"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line, found",
    [
        ("make nothing", ["make knows no nothing"]),
        ("make fuzz CASE=3", ["make knows no CASE=3"]),
        ("python -m tests.nothing", ["there is no module tests.nothing"]),
        ("python -m tests.fuzz --nothing", ["__main__.py knows no --nothing"]),
        ("python bench/nothing.py", ["there is no file bench/nothing.py"]),
        ("MESHC_NOTHING=1 python mlp.py", ["MESHC_NOTHING is read by nobody"]),
        ("meshc show saved.meshc --nothing", ["meshc: meshc: error: unrecognized arguments: --nothing"]),
        ("torchrun --nproc-per-node 4 -m meshc nothing", ["meshc: meshc: error: argument COMMAND: invalid choice: 'nothing'"]),
        ("torchrun --nprocs 4 train.py", ["torchrun: "]),
        ("MESHC_DUMP=out torchrun --nproc-per-node 2 examples/train_llama.py  # said", []),
        ("python -m pytest tests/nothing.py", ["there is no tests/nothing.py"]),
    ],
)
def test_a_dead_command_is_found(line: str, found: list[str]) -> None:
    made = faults(line)
    assert len(made) == len(found) and all(one.startswith(said) for one, said in zip(made, found, strict=True)), made


def test_commands_are_found_where_they_stand() -> None:
    indented = "    make demo     # says\n    make fuzz SEED=0    python -m tests.fuzz\n    makes none\n"
    page = f"Run `meshc\nshow x`:\n\n{indented}\n```sh\ncd docs\n```\n"
    assert list(lines(page)) == ["cd docs", "make demo", "make fuzz SEED=0", "python -m tests.fuzz"]
    assert list(spans(page)) == ["meshc show x"]


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
    assert place.strip().splitlines()[1].strip() in (ROOT / "passes" / "pipeline.py").read_text()


def test_the_spine_has_the_lengths_that_the_page_says() -> None:
    rows = re.findall(r"^\| `(\S+\.py)` \| (\d+) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    lengths = {file: (int(told), len((ROOT / file).read_text().splitlines())) for file, told in rows}
    assert {file: both for file, both in lengths.items() if not 0.8 <= both[0] / both[1] <= 1.25} == {}


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert reference.PAGE.read_text() == reference.page(), "make reference"
    assert reference.FILES.read_text() == reference.files_page(), "make reference"


def test_a_page_that_is_written_by_hand_has_at_most_400_lines() -> None:
    generated = {"reference.md", "files.md", "coverage.md"}
    lengths = {page.name: len(page.read_text().splitlines()) for page in (ROOT / "docs").glob("*.md") if page.name not in generated}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_the_site_has_every_page() -> None:
    told = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(["readme.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])
