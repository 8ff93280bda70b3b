"""docs/words.md is alive: its files are there and use their words, each word stands once, and what it is not called is no name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import meshc

ROOT = Path(meshc.__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "words.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| word |"))
]


def test_every_word_stands_once_with_its_meaning_and_its_file() -> None:
    assert len(ROWS) > 40 and all(len(row) == 4 and row[1] for row in ROWS)
    assert [word for word, count in Counter(row[0] for row in ROWS).items() if count > 1] == []


def test_its_file_is_there_and_uses_the_word() -> None:
    missing = []
    for word, _, where, _ in ROWS:
        path = ROOT / where.strip("`")
        last = word.partition(" (")[0].split()[-1]
        if not path.exists() or last[:5].lower() not in path.read_text().lower():
            missing.append(f"{word}: {where}")
    assert missing == []


@cache
def named() -> list[tuple[Path, list[str], list[str]]]:
    """The names of classes and of functions, file by file."""
    found = []
    for folder in ("meshc", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
            classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
            found.append((path, classes, [node.name for node in nodes if isinstance(node, ast.FunctionDef)]))
    return found


def test_what_a_word_is_not_called_is_no_name() -> None:
    refused = {name for row in ROWS for name in row[3].replace(",", " ").split()}
    assert "homes" in refused
    found = []
    for path, classes, functions in named():
        names = (path.stem, *classes, *functions)
        found += [f"{path.relative_to(ROOT)}: {name}" for name in names if re.sub(r"^_+", "", name).lower() in refused]
    assert found == []


def test_a_word_is_the_name_of_one_class_at_most() -> None:
    words = {re.sub(r" \(.*", "", row[0]).title().replace(" ", "") for row in ROWS}
    assert {"Program", "Stage", "PipelineStage"} <= words
    found = Counter(name for _, names, _ in named() for name in names if name in words)
    assert [name for name, count in found.items() if count > 1] == []
