"""The house's walls: which module may see which, and that each module exists once."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SEES_BOTH = ("meshc.api", "meshc.__main__", "meshc.commands", "meshc.testing.brute_force")
"""The only modules that may know the passes and the runtime. Nothing but tests and users imports `meshc.testing`."""

SEES_THE_FACE = ("meshc.api", "meshc.__main__", "meshc.commands")
"""The only modules, beside the package that offers it, that may import `meshc.api`: the command line, and itself."""


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of the package, the linked folders under the names they are imported by."""
    for folder in (ROOT / "meshc", ROOT / "passes", ROOT / "runtime"):
        prefix = ("meshc",) if folder.name == "meshc" else ("meshc", folder.name)
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if folder.name == "meshc" and parts[0] in ("passes", "runtime"):
                continue  # seen through the links; Python before 3.13 does not follow them here, later ones may
            yield ".".join(prefix + (parts[:-1] if parts[-1] == "__init__" else parts)), file


@cache
def imported(module: str, is_package: bool, source: str) -> tuple[str, ...]:
    """Dotted names that a module's text imports anywhere in it, functions and type-checking blocks included."""
    return tuple(_imported(module, is_package, source))


def _imported(module: str, is_package: bool, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room(module: str) -> str:
    return next((package for package in ("meshc.passes", "meshc.runtime") if within(module, package)), "meshc")


def offence(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None."""
    if within(target, "passes") or within(target, "runtime"):
        return "a second copy under the top-level name"
    if within(target, "meshc.api"):
        return None if module == "meshc" or any(within(module, other) for other in SEES_THE_FACE) else "below the public face"
    for package in ("meshc.passes", "meshc.runtime"):
        if within(target, package) and room(module) != package and not any(within(module, other) for other in SEES_BOTH):
            return f"{room(module)} does not know {package}"
    return None


def test_arrows_run_one_way() -> None:
    offences = [
        f"{module} imports {target}: {reason}"
        for module, file in modules()
        for target in imported(module, file.name == "__init__.py", file.read_text())
        if (reason := offence(module, target))
    ]
    assert offences == []


def test_both_linked_folders_are_walked() -> None:
    names = [name for name, _ in modules()]
    assert {"meshc.passes", "meshc.runtime", "meshc.errors"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "module, source",
    [
        ("meshc.passes.partition", "from meshc.runtime.state.store import Store"),
        ("meshc.passes.partition", "from meshc import runtime"),
        ("meshc.passes.partition", "from ..runtime import store"),
        ("meshc.runtime.execute", "def f():\n    import meshc.passes.pipeline"),
        ("meshc.runtime.execute", "import meshc.api"),
        ("meshc.passes.partition", "from meshc import api"),
        ("meshc.plan", "from meshc.passes import partition"),
        ("meshc.plan", "from meshc.api.compile import compile"),
        ("meshc.api", "import passes.partition"),
    ],
)
def test_a_planted_offence_is_found(module: str, source: str) -> None:
    assert any(offence(module, target) for target in imported(module, False, source))


@pytest.mark.parametrize(
    "module, source",
    [
        ("meshc.api", "from meshc.passes.stages import cut_stages\nfrom meshc.runtime import execute"),
        ("meshc.__main__", "import meshc.api"),
        ("meshc.commands.compile", "from meshc.api import compile"),
        ("meshc.passes.partition", "from meshc.rules import rule_of\nfrom meshc.errors import PlanError"),
        ("meshc.runtime.execute", "import runtimes"),
    ],
)
def test_what_is_allowed_stays_allowed(module: str, source: str) -> None:
    assert not any(offence(module, target) for target in imported(module, False, source))


def drawer(module: str) -> str:
    """The folder that a module lies in; what lies in none of a package's folders is one by itself."""
    depth = 3 if room(module) != "meshc" else 2
    return ".".join(module.split(".")[:depth])


def arrows() -> dict[str, set[str]]:
    """Folder -> the folders that its modules import."""
    known = {module for module, _ in modules()}
    found: dict[str, set[str]] = {}
    for module, file in modules():
        targets = {target for target in imported(module, file.name == "__init__.py", file.read_text()) if target in known}
        targets -= {a for a in targets if any(within(b, a) and b != a for b in targets)}  # of `from a import b` the module b
        found.setdefault(drawer(module), set()).update(drawer(target) for target in targets)
    return {folder: targets - {folder} for folder, targets in found.items()}


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Folders that import each other in a circle, and those that import such; or none."""
    left = dict(arrows)
    while done := [folder for folder, targets in left.items() if not targets & left.keys()]:
        for folder in done:
            del left[folder]
    return sorted(left)


def test_folders_import_each_other_in_no_circle() -> None:
    assert circle(arrows()) == []


def test_the_passes_have_ten_rooms_and_the_list_of_passes_lies_below_what_searches() -> None:
    rooms = sorted(path.name for path in (ROOT / "passes").iterdir() if (path / "__init__.py").exists())
    assert rooms == ["depth", "driver", "lower", "memory", "partition", "phases", "place", "planner", "stages", "trace"]
    found = arrows()
    assert "meshc.passes.pipeline" in found["meshc.passes.driver"]
    for file in ("pipeline", "pass_runner", "dump"):
        assert not found[f"meshc.passes.{file}"] & {"meshc.passes.driver", "meshc.passes.planner"}


def entries() -> dict[str, set[str]]:
    """Of each room of passes, the modules that others import. Passes themselves are run by the list, which names them."""
    names, found = {name for name, _ in modules()}, defaultdict(set)
    for module, file in modules():
        for target in imported(module, file.name == "__init__.py", file.read_text()):
            parts = target.split(".")
            if target in names and parts[:2] == ["meshc", "passes"] and len(parts) > 3 and module.split(".")[:3] != parts[:3]:
                found[parts[2]].add(".".join(parts[3:]))
    return found


def test_a_room_of_passes_says_at_its_door_what_others_import() -> None:
    """`phases` is data, which all of them are made of."""
    told = {}
    for name in entries():
        door = (ROOT / "passes" / name / "__init__.py").read_text().partition("Others import")[2].partition('"""')[0]
        told[name] = set(re.findall(r"`(\w+)`", door))
    assert {name: found ^ told[name] for name, found in entries().items() if name != "phases" and found != told[name]} == {}


def test_a_planted_circle_is_found() -> None:
    found = arrows()
    assert "meshc.ir" in found["meshc.plan"]
    found["meshc.ir"] |= {"meshc.plan"}
    assert {"meshc.ir", "meshc.plan"} <= set(circle(found))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel holds, built from the project alone."""
    source, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "built", "unpacked"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("meshc", "passes", "runtime", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys, setuptools.build_meta; setuptools.build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(built)], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(unpacked)
    return unpacked


def test_what_is_installed_is_whole_and_has_no_tool_of_development(installed: Path) -> None:
    tops = {path.name for path in installed.iterdir()}
    assert "meshc" in tops and all(name == "meshc" or name.endswith(".dist-info") for name in tops), tops
    assert sorted(path.name for path in (installed / "meshc/testing").iterdir()) == [
        "__init__.py", "brute_force.py", "rank_tiles.py", "rule_proof.py",
    ]  # fmt: skip
    there = {str(path.relative_to(installed)) for path in installed.rglob("*.py")}
    assert {file for _, file in modules_as_imported()} <= there


def modules_as_imported() -> Iterator[tuple[str, str]]:
    for name, file in modules():
        path = name.replace(".", "/")
        yield name, f"{path}/__init__.py" if file.name == "__init__.py" else f"{path}.py"


def test_there_is_no_second_copy_of_a_linked_folder(installed: Path, tmp_path: Path) -> None:
    """From a folder that has nothing to do with the project, with the package installed, only `meshc` exists; importing it does
    not import torch's compiler. And users can prove their rules."""
    script = """
import importlib, importlib.util, pkgutil, sys
import meshc
for found in pkgutil.walk_packages(meshc.__path__, "meshc."):
    # those need libraries that meshc does not
    needs = ("meshc.testing", "meshc.ops.philox_triton", "meshc.runtime.saved.trainer_checkpoint")
    if found.name != "meshc.__main__" and not found.name.startswith(needs):
        importlib.import_module(found.name)
print(meshc.__file__)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("passes", "runtime")))
print([name for name in ("passes", "runtime", "tests") if importlib.util.find_spec(name)])
print("torch._dynamo" in sys.modules)
import torch
import meshc.testing
print(meshc.testing.prove_rule("aten::mm", [(torch.randn(4, 3), torch.randn(3, 5))]))
print("hypothesis" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    file, seconds, others, compiler, proof, hypothesis = done.stdout.splitlines()
    assert Path(file) == installed / "meshc/__init__.py"
    assert (seconds, others) == ("[]", "[]") and compiler == "False", "torch._dynamo is for tracing alone, and slow to import"
    assert proof == "aten.mm: 32 ways to split 1 sample are equal; split were m, +k, n"
    assert hypothesis == "False"
