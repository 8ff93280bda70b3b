"""docs/replacements.md, made of the registry `meshc.replacements` and of the calls that replace.

    python -m tests.replacements_page           writes the page (`make reference`)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import meshc
from meshc.replacements import REPLACEMENTS

ROOT: Final = Path(meshc.__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "replacements.md"
CALLS: Final = ("replace_targets", "replace_in", "replace_for_good")
HEAD: Final = """# What is replaced of other libraries

Made by `make reference` of `meshc/replacements.py`, the one registry, and of the calls that replace; do not edit it here.

- since: the first release in which a target was seen in its form.
- for: how long it is replaced: a trace of a model (or the reference run that a program is compared with), a call, the rest of the process
  (from the first compiled model on), or the life of an object, such as a Trainer or a compiled model.
- otherwise: what the library does, or what would be without it.

A target that is gone or has another form raises `UnsupportedTorch`. `tests/test_replacements.py` is the canary of each, and
`tests/frontend/test_undone.py` compares a process before and after. Hooks and settings that a library offers are no replacements (forward
hooks, `torch._dynamo.config.patch`, `sys.excepthook`), nor are attributes of a user's own modules (`meshc/frontend/listed_experts.py`).
"""


def names_in(text: str) -> Iterator[str]:
    """Names of the registry in a file's calls; where one is no literal, the file's own strings are looked through."""
    if not any(name in text for name in CALLS):
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in CALLS:
            continue
        if node.func.id == "replace_targets":
            yield from (word.arg for word in node.keywords if word.arg)
        elif isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)
        else:
            strings = (one.value for one in ast.walk(tree) if isinstance(one, ast.Constant))
            yield from (one for one in strings if isinstance(one, str) and one in REPLACEMENTS)


def by_file() -> dict[str, list[str]]:
    """File -> the names of what it replaces."""
    files = [path for folder in ("meshc", "passes", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): list(dict.fromkeys(names_in(path.read_text()))) for path in files}
    return {path: names for path, names in found.items() if names and not path.startswith(("meshc/passes/", "meshc/runtime/"))}


def page() -> str:
    """The page: a table for each library."""
    files, sections = by_file(), dict[str, list[str]]()
    for name, entry in REPLACEMENTS.items():
        by = ", ".join(f"`{path}`" for path, names in files.items() if name in names)
        row = f"| `{entry.target.replace(':', '.')}` | {entry.since} | {entry.during} | {by} | {entry.why} |"
        sections.setdefault(entry.library, []).append(row)
    head = "| target | since | for | by | otherwise |\n|---|---|---|---|---|"
    return "\n".join([HEAD, *(f"## {library}\n\n{head}\n" + "\n".join(rows) + "\n" for library, rows in sections.items())])


if __name__ == "__main__":
    PAGE.write_text(page())
