"""docs/words.md is alive: its files are there and use their words, each word stands once, and words that are out grow fewer."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests import words_left
from tests.words_left import ROOT

ROWS = words_left.rows()


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


def test_words_that_are_out_grow_fewer() -> None:
    """A word that is new in a file fails; so does a list that says more than there is, which `python -m tests.words_left` writes anew."""
    assert {"homes", "pending", "lies"} <= words_left.words_out()
    assert words_left.left() == json.loads(words_left.LIST.read_text())


def test_each_place_of_a_word_counts() -> None:
    file = ROOT / "meshc" / "ir" / "pending_homes.py"
    source = '"""What lies there.\n\nIt lies."""\n\ndef has_pending() -> str:\n    """Lies."""\n    return f"it lies on {1}"\n'
    assert words_left.counts_of(source, file, {"pending", "homes", "lies"}) == {"pending": 2, "homes": 1, "lies": 3}


def test_a_word_is_the_name_of_one_class_at_most() -> None:
    words = {re.sub(r" \(.*", "", row[0]).title().replace(" ", "") for row in ROWS}
    assert {"Program", "Stage", "PipelineStage"} <= words
    found = Counter(name for _, names, _ in named() for name in names if name in words)
    assert [name for name, count in found.items() if count > 1] == []
