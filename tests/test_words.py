"""docs/words.md is alive: its files are there and use their words, each word stands once, and what it is not called is no name."""

from __future__ import annotations

import ast
import re
from collections import Counter
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


def test_what_a_word_is_not_called_is_no_name() -> None:
    refused = {name for row in ROWS for name in row[3].replace(",", " ").split()}
    assert "homes" in refused
    found = []
    for folder in ("meshc", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = ast.parse(path.read_text())
            names = [node.name for node in ast.walk(text) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
            found += [f"{path.relative_to(ROOT)}: {name}" for name in (path.stem, *names) if re.sub(r"^_+", "", name).lower() in refused]
    assert found == []
