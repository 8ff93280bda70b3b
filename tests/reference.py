"""docs/reference.md and docs/files.md, written from docstrings: what users import, and what each file of the compiler has.

    python -m tests.reference           writes both pages (`make reference`)
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import meshc
from meshc.options import GROUPS

ROOT: Final = Path(meshc.__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "reference.md"
FILES: Final = ROOT / "docs" / "files.md"
MODULES: Final = ("meshc.reference", "meshc.recipes", "meshc.testing", "meshc.runtime.saved_state")
"""What is imported from elsewhere than `meshc` itself."""
HEAD: Final = """# Reference

What users import, with what each says of itself. Made by `make reference` of the docstrings; do not edit it here.
"""


FILES_HEAD: Final = """# Files

What each file has, by folder: the first line of its docstring. Made by `make reference`; do not edit it here.
[architecture.md](architecture.md) is the tour: how the folders go together, and what happens to one tensor between them.
"""


def files_page() -> str:
    """docs/files.md: a table for each folder, with the folder's own first line above."""
    parts = [FILES_HEAD]
    folders: dict[Path, list[Path]] = {}
    for top in ("meshc", "passes", "runtime"):
        links = {ROOT / "meshc" / "passes", ROOT / "meshc" / "runtime"} if top == "meshc" else set()
        for file in sorted((ROOT / top).rglob("*.py")):
            if not links & set(file.parents):
                folders.setdefault(file.parent, []).append(file)
    for folder, files in sorted(folders.items(), key=lambda item: item[0].relative_to(ROOT).parts):
        parts += [f"## {folder.relative_to(ROOT)}/\n", *([line, ""] if (line := _first_line(folder / "__init__.py")) else [])]
        rows = [f"| `{file.name}` | {_first_line(file)} |" for file in files if file.name != "__init__.py"]
        parts += ["| file | what it has |\n|---|---|", *rows, ""] if rows else []
    return "\n".join(parts).rstrip() + "\n"


def _first_line(file: Path) -> str:
    text = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def page() -> str:
    """docs/reference.md."""
    names = sorted(name for name in meshc.__all__ if not name.startswith("_"))
    kinds = {name: getattr(meshc, name) for name in names}
    errors = [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Exception)]
    parts = [HEAD]
    after_options = {kind.__name__: ("Options", kind.__name__) for kind in GROUPS.values()}
    for name in sorted((name for name in names if name not in errors), key=lambda name: after_options.get(name, (name, ""))):
        parts += _entry(f"meshc.{name}", kinds[name])
    parts += ["## Errors\n", *(f"- `meshc.{name}`: {_one_line(kinds[name])}" for name in errors), ""]
    for module in MODULES:
        found = importlib.import_module(module)
        parts += [f"## {module}\n", f"{_one_line(found)}\n"]
        for name in sorted(getattr(found, "__all__", [name for name in vars(found) if not name.startswith("_")])):
            value = getattr(found, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                parts += _entry(f"{module}.{name}", value, "###")
    return "\n".join(parts).rstrip() + "\n"


def _entry(name: str, value: Any, level: str = "##") -> Iterator[str]:
    yield f"{level} {name}\n"
    yield _block(_signature(value, name), inspect.getdoc(value))
    if inspect.isclass(value):
        for method, found in sorted(vars(value).items()):
            if not method.startswith("_") and (inspect.isfunction(found) or isinstance(found, property | classmethod | staticmethod)):
                said = inspect.getdoc(found)
                if said:
                    yield f"{level}# {name}.{method}\n"
                    plain = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
                    yield _block("" if isinstance(found, property) else _signature(plain, method), said)


def _signature(value: Any, name: str) -> str:
    try:
        found = f"{name}{inspect.signature(value)}".replace("'", "")
        return re.sub(rf"= ({'|'.join(kind.__name__ for kind in GROUPS.values())})\([^()]*\)", r"= \1()", found)
    except (TypeError, ValueError):
        return name


def _block(signature: str, said: str | None) -> str:
    text = "\n\n".join(part for part in (signature, said or "") if part)
    return f"```text\n{text}\n```\n"


def _one_line(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    for path, text in ((PAGE, page()), (FILES, files_page())):
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
