"""The canary: every name that meshc uses of torch and transformers without a promise is there, and nothing else is used."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import meshc
from meshc import private, replacements

ROOT = Path(meshc.__file__).parent.parent
SOURCES = [path for folder in ("meshc", "passes", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))]
PLACES = [*private.NAMES.values(), *private.REACHED, *replacements.places_of("torch")]


@pytest.mark.parametrize("place", PLACES)
def test_it_is_where_the_table_says(place: str) -> None:
    try:
        private.resolve_name(place)
    except private.UnsupportedTorch as error:
        pytest.fail(f"{error}\n  now: {', '.join(elsewhere(place)) or 'nothing in torch has that name'}")


@pytest.mark.parametrize("place", private.OF_TRANSFORMERS)
def test_stock_models_have_what_they_need(place: str) -> None:
    private.resolve_name(place)


def test_a_name_that_has_moved_is_said_with_the_releases_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(private.NAMES, "FakeTensorMode", "torch._subclasses.moved:FakeTensorMode")
    monkeypatch.delitem(vars(private), "FakeTensorMode", raising=False)
    with pytest.raises(meshc.CompileError, match=r"(?s)torch \d.* has no torch._subclasses.moved.FakeTensorMode, .*torch 2.11 to 2.14"):
        from meshc.private import FakeTensorMode  # noqa: F401
    assert "torch._subclasses.fake_tensor" in elsewhere("torch._subclasses.moved:FakeTensorMode")


def test_no_other_file_imports_a_private_module_of_torch() -> None:
    found = [f"{path.relative_to(ROOT)}: {name}" for path in SOURCES if path.name != "private.py" for name in uses(path)[0]]
    assert found == []


def test_what_is_reached_by_attribute_stands_in_the_table() -> None:
    known = {place.replace(":", ".") for place in PLACES}
    found = {name: path for path in SOURCES if path.name != "private.py" for name in uses(path)[1]}
    missing = [f"{path.relative_to(ROOT)}: {name}" for name, path in found.items() if not any(_covers(place, name) for place in known)]
    assert missing == []


def _covers(place: str, name: str) -> bool:
    return place == name or place.startswith(f"{name}.") or name.startswith(f"{place}.")


@cache
def uses(path: Path) -> tuple[list[str], list[str]]:
    """Private modules of torch's that a file imports, and `torch.x._y.z` wherever it is written, as far as its last name."""
    text = path.read_text()
    if not re.search(r"torch[\w.\s]*\._|from torch[\w.]* import (.*\b_|\()", text):
        return [], []  # parsing seven hundred files takes two seconds
    nodes = [*ast.walk(ast.parse(text))]
    return [*imported(nodes)], [*reached(nodes)]


def imported(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        yield from (name for name in names if re.match(r"torch(\.\w+)*\._[a-z]", name))


def reached(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if root is not node and isinstance(root, ast.Name) and root.id == "torch":
            name = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)*\._[A-Za-z]\w*(\.\w+)*", name) and ".ops." not in name:
                yield name


def elsewhere(place: str) -> list[str]:
    """Modules of torch's that have the name now."""
    module, _, path = place.partition(":")
    name = (path or module).rpartition(".")[-1] or path
    package = importlib.import_module(".".join(module.split(".")[:2]))
    found = []
    for one in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + ".", onerror=lambda _: None):
        text = Path(one.module_finder.path, *[one.name.rpartition(".")[-1] + ".py"])  # type: ignore[union-attr]
        if text.exists() and re.search(rf"^(class|def) {re.escape(name)}\b|^{re.escape(name)}\b *[:=]", text.read_text(), re.M):
            found.append(one.name)
    return found
