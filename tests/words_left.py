"""Words that docs/words.md rules out and that the code still has: counts by file, which may only shrink.

    python -m tests.words_left        writes tests/words_left.json from the code as it is

A word is looked for in every component of the names of files, classes and functions, in first lines of docstrings, and in messages and
other strings.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import meshc
from tests.test_layout import modules

ROOT = Path(meshc.__file__).parent.parent
LIST = Path(__file__).with_suffix(".json")
KEPT = {"meshc/plan/entries.py": {"pending"}, "meshc/text/parse.py": {"pending"}, "meshc/text/libraries.py": {"bundled"}}
"""Words of earlier plans and artifacts, which are still read, and of torch's namespaces."""


def rows() -> list[list[str]]:
    """The cells of each row of the page: word, meaning, file, words that it is not called."""
    lines = (ROOT / "docs" / "words.md").read_text().splitlines()
    kept = [line for line in lines if line.startswith("|") and not line.startswith(("|---", "| word |"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


def words_out() -> set[str]:
    return {word for row in rows() for word in row[3].replace(",", " ").split()}


def texts(tree: ast.Module) -> Iterator[str]:
    """First lines of docstrings, whole strings of any other kind."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            documented.add(id(node.body[0].value))  # type: ignore[attr-defined]
            yield text.partition("\n")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


def components(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    """(file, syntax tree) of every module."""
    return [(path, ast.parse(path.read_text())) for _, path in modules()]


def counts_of(tree: ast.Module, path: Path, out: set[str]) -> dict[str, int]:
    """How often a file has each of the words that are out."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    found = Counter(part for name in (path.stem, *names) for part in components(name) if part in out)
    found.update(name.lstrip("_").lower() for name in names if "_" in name.lstrip("_") and name.lstrip("_").lower() in out)
    found.update(word.lower() for text in texts(tree) for word in re.findall(r"\w+", text) if word.lower() in out)
    return {word: count for word, count in sorted(found.items()) if word not in KEPT.get(str(path.relative_to(ROOT)), ())}


def left() -> dict[str, dict[str, int]]:
    out = words_out()
    every = {str(path.relative_to(ROOT)): counts_of(tree, path, out) for path, tree in trees()}
    return {path: found for path, found in every.items() if found}


if __name__ == "__main__":
    LIST.write_text(json.dumps(left(), indent=1) + "\n")
    print(f"{sum(sum(found.values()) for found in left().values())} are left")
