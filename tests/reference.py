"""docs/reference.md, made of the docstrings of what users import.

    python -m tests.reference           writes the page (`make reference`)
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import meshc

PAGE: Final = Path(meshc.__file__).resolve().parents[1] / "docs" / "reference.md"
MODULES: Final = ("meshc.reference", "meshc.recipes", "meshc.testing", "meshc.runtime.saved_state")
"""What is imported from elsewhere than `meshc` itself."""
HEAD: Final = """# Reference

What users import, with what each says of itself. Made by `make reference` of the docstrings; do not edit it here.
"""


def page() -> str:
    """The whole page."""
    names = sorted(name for name in meshc.__all__ if not name.startswith("_"))
    kinds = {name: getattr(meshc, name) for name in names}
    errors = [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Exception)]
    parts = [HEAD]
    for name in [name for name in names if name not in errors]:
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
        return f"{name}{inspect.signature(value)}".replace("'", "")
    except (TypeError, ValueError):
        return name


def _block(signature: str, said: str | None) -> str:
    text = "\n\n".join(part for part in (signature, said or "") if part)
    return f"```text\n{text}\n```\n"


def _one_line(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
