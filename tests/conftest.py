"""Settings of all tests: properties are tried on the same examples in every run, and none of them is judged by the clock. What
`meshc calibrate` has measured on a developer's machine plays no part. Python looks for garbage rarely, and never among what was imported
before the first test: each look went through two million objects, and there were some in every test. Between two looks there may be some
100 MB of it. Each program that a test compiles is proved (tests/proving.py)."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from meshc.ops.implementations import register_operators
from tests import budget
from tests.proving import PROOFS, prove_all

settings.register_profile("meshc", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("meshc")

os.environ["MESHC_DEVICES"] = os.devnull
register_operators()  # tests name them as torch.ops.meshc
prove_all()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests with one mark are asked for, files and folders without it need not be imported, which takes longer than reading
    them."""
    mark = str(config.getoption("markexpr")).partition(" ")[0]
    if mark not in ("processes", "alone") or not (collection_path.is_dir() or collection_path.match("test_*.py")):
        return None
    return None if _has_mark(collection_path, mark) else True


@cache
def _has_mark(path: Path, mark: str) -> bool:
    """Whether a test file, or one in a folder, mentions a mark."""
    if path.is_dir():
        return any(_has_mark(file, mark) for file in path.rglob("test_*.py"))
    return f"mark.{mark}" in path.read_text()


@pytest.fixture(autouse=True)
def proofs(request: pytest.FixtureRequest) -> None:
    """Programs of a test are proved, unless it is marked `unproved`."""
    PROOFS.wanted = request.node.get_closest_marker("unproved") is None


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is listed in tests/broad.txt, before `-m` asks, and has quick files run first."""
    for item in items:
        if budget.is_listed(item.nodeid, budget.listed()) and not budget.by_hand(item):
            item.add_marker(pytest.mark.broad(listed=True))
    items[:] = budget.in_order(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
