"""Tests that `make test` leaves to `make test-broad`, decided by measured seconds and a budget for each folder.

    python -m tests.budget                      writes tests/broad.txt and the table of docs/tests.md
    python -m tests.budget --measure [PATH...]  measures first: all that `make test` runs at once with others, or what lies under the paths
    python -m tests.budget --measure -m broad   measures what is marked `broad` by hand, too

Seconds are those of a processor, of a test and of the processes it waits for; where ranks compute for it, of the clock. A folder that
takes more than its budget gives up cases of parametrized tests, the dearest first, of each test all but the cheapest; then whole tests
that take more than WHOLE seconds by their cheapest case, likewise, but none that is the last of its file. What tests/broad.txt lists is
marked `broad` as pytest collects it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.coverage_page import put

ROOT = Path(__file__).resolve().parent.parent
SECONDS = ROOT / "tests" / "seconds.json"
LIST = ROOT / "tests" / "broad.txt"
PAGE = ROOT / "docs" / "tests.md"

ASIDE = "not alone and not gpu and not frameworks"
"""What is measured and decided: the others wait by the clock, or are not there."""

QUICK = 0.1
"""Cases that take less are one number with others of their test."""
WHOLE = 0.6
"""A test moves whole only where its cheapest case takes more."""
FIRST = 3.0
"""Files that take less run before the others."""
BUDGET = {
    "tests/api": 26, "tests/cost": 12, "tests/frontend": 20, "tests/fuzz": 8, "tests/meaning": 55, "tests/ops": 8, "tests/optimizer": 6,
    "tests/passes": 8, "tests/passes/depth": 4, "tests/passes/driver": 15, "tests/passes/lower": 12, "tests/passes/memory": 10,
    "tests/passes/partition": 5, "tests/passes/place": 11, "tests/passes/planner": 9, "tests/passes/stages": 6, "tests/passes/trace": 13,
    "tests/pipelining": 14, "tests/processes": 190, "tests/report": 7,
}  # fmt: skip
"""Seconds of folders in `make test`. A folder that is not listed keeps all it has."""
KEPT = {
    "tests/api/test_one_text.py::test_processes_compile_one_text",
    "tests/fuzz/test_random_programs.py::test_random_cases",
}
"""Tests that stay whatever they take."""

Seconds = dict[str, dict[str, float]]
"""File -> what stands behind `::` in the name of a case -> seconds; under the name of its test, those of all cases below QUICK."""


def layer(file: str) -> str:
    """The folder of a budget: two levels, three of passes."""
    folders = file.split("/")[:-1]
    return "/".join(folders[: 3 if folders[1:2] == ["passes"] else 2])


def function(case: str) -> str:
    return case.partition("[")[0]


@cache
def stored() -> tuple[Seconds, Seconds]:
    """What `make test` had before anything moved, and what is marked by hand."""
    both = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return both.get("sampled", {}), both.get("by hand", {})


@cache
def listed() -> frozenset[str]:
    return frozenset(LIST.read_text().splitlines()) if LIST.exists() else frozenset()


def is_listed(name: str, moved: Iterable[str]) -> bool:
    return name in moved or function(name) in moved


def seconds_of(name: str, seconds: Seconds) -> float | None:
    """None for what is not measured, 0 for a quick case."""
    file, _, case = name.partition("::")
    known = seconds.get(file, {})
    return known.get(case, 0.0 if function(case) in known else None)


def decide(seconds: Seconds, budget: dict[str, int], whole: float = WHOLE) -> list[str]:
    """The names of cases and of whole tests that move, sorted."""
    moved: set[str] = set()
    for folder, limit in budget.items():
        tests: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for file, cases in seconds.items():
            if layer(file) == folder:
                for case, taken in cases.items():
                    tests[file][function(case)][case] = taken
        left = sum(taken for functions in tests.values() for cases in functions.values() for taken in cases.values())
        for taken, name in _dearest_first(_spare_cases(tests)):
            if left > limit:
                moved.add(name)
                left -= taken
        for taken, name in _dearest_first(_spare_tests(tests, moved, whole)):
            if left > limit:
                moved = {other for other in moved if not other.startswith(f"{name}[")} | {name}
                left -= taken
    return sorted(moved)


def _dearest_first(rows: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    return sorted(rows, key=lambda row: (-row[0], row[1]))


def _spare_cases(tests: dict[str, dict[str, dict[str, float]]]) -> Iterator[tuple[float, str]]:
    for file, functions in tests.items():
        for name, cases in functions.items():
            single = {case: taken for case, taken in cases.items() if "[" in case}
            kept = None if name in cases else min(single, key=lambda case: (single[case], case), default=None)
            yield from ((taken, f"{file}::{case}") for case, taken in single.items() if case != kept)


def _spare_tests(tests: dict[str, dict[str, dict[str, float]]], moved: set[str], whole: float) -> Iterator[tuple[float, str]]:
    """With the seconds of what is left of them."""
    for file, functions in tests.items():
        left = {
            name: sum(taken for case, taken in cases.items() if f"{file}::{case}" not in moved)
            for name, cases in functions.items()
        }
        kept = min(left, key=lambda name: (left[name], name))
        yield from (
            (left[name], f"{file}::{name}")
            for name, cases in functions.items()
            if name != kept and f"{file}::{name}" not in KEPT and min(cases.values()) > whole
        )


def table(seconds: Seconds, by_hand: Seconds, moved: Iterable[str]) -> str:
    """Seconds of each folder, in Markdown."""
    moved, rows = set(moved), defaultdict(lambda: [0.0, 0.0, 0, 0])
    for file, cases in seconds.items():
        for case, taken in cases.items():
            rows[layer(file)][is_listed(f"{file}::{case}", moved)] += taken
    for file, cases in by_hand.items():
        rows[layer(file)][1] += sum(cases.values())
    for name in moved:
        rows[layer(name.partition("::")[0])][2 if "[" in name else 3] += 1
    lines = ["| folder | budget | `make test` | `make test-broad` | cases moved | tests moved whole |", "|---|---|---|---|---|---|"]
    named = [(f"`{folder}/` | {BUDGET.get(folder, 'all')}", row) for folder, row in sorted(rows.items())]
    for name, (here, broad, cases_moved, tests_moved) in [*named, ("all | ", [sum(column) for column in zip(*rows.values(), strict=True)])]:
        lines.append(f"| {name} | {here:.0f} | {broad:.0f} | {cases_moved or ''} | {tests_moved or ''} |")
    return "\n".join(lines) + "\n"


def in_order(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Quick files first, then those that start processes and the others, the longest first, so that none of them is alone at the end.

    Each of several workers begins with a share of its own, all of as many cases; what it has left when others are done they take.
    """
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)

    def place(file: str) -> tuple[int, float]:
        taken = sum(seconds for case, seconds in stored()[0].get(file, {}).items() if not is_listed(f"{file}::{case}", listed()))
        starts = any(item.get_closest_marker("processes") for item in files[file])
        return (1, -taken) if starts else (0, taken) if taken < FIRST else (2, -taken)

    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for file in sorted(sorted(files), key=place):
        min(shares, key=len).extend(files[file])
    return [item for share in shares for item in share]


class Collector:
    """The names of all cases there are, and which of them are marked by hand."""

    def __init__(self) -> None:
        self.by_hand: dict[str, bool] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.by_hand = {item.nodeid: by_hand(item) for item in session.items}


def by_hand(item: pytest.Item) -> bool:
    return any(not mark.kwargs.get("listed") for mark in item.iter_markers("broad"))


def measure(arguments: list[str]) -> dict[str, float]:
    """Seconds of the tests that ran."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "tests.measuring", *arguments]
        subprocess.run([sys.executable, *command], cwd=ROOT, env={**os.environ, "MEASURED": folder}, check=False)
        lines = [line for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    return dict(json.loads(line) for line in lines)


def merged(seconds: tuple[Seconds, Seconds], measured: dict[str, float], names: dict[str, bool]) -> tuple[Seconds, Seconds]:
    """What is stored of tests that there still are, with what was measured now."""
    both: tuple[Seconds, Seconds] = ({}, {})
    quick: dict[tuple[bool, str, str], float] = defaultdict(float)
    again = {function(name) for name in measured}
    for name, hand in names.items():
        file, _, case = name.partition("::")
        taken = measured.get(name, seconds_of(name, seconds[hand]))
        if taken is None:
            continue
        if taken >= QUICK:
            both[hand].setdefault(file, {})[case] = round(taken, 2)
        else:
            quick[hand, file, function(case)] += measured.get(name, 0.0)
    for (hand, file, test), taken in quick.items():
        before = 0.0 if f"{file}::{test}" in again else seconds[hand].get(file, {}).get(test, 0.0)
        both[hand].setdefault(file, {})[test] = round(before + taken, 2)
    return both


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.budget", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", nargs="*", metavar="PATH", help="run and measure the tests under these paths first, all without any")
    parser.add_argument("-m", dest="mark", default="not broad", help="of those, the tests with these marks")
    asked = parser.parse_args(arguments)
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-qq", "-m", ASIDE], plugins=[collector])
    seconds = stored()
    if asked.measure is not None:
        seconds = merged(seconds, measure([*asked.measure, "-m", f"({asked.mark}) and {ASIDE}"]), collector.by_hand)
        _write(seconds)
    moved = decide(seconds[0], BUDGET)
    LIST.write_text("".join(f"{name}\n" for name in moved))
    put("seconds", table(*seconds, moved), PAGE)
    for hand, what in enumerate(("count as quick", "are marked by hand")):
        unknown = [name for name, mine in collector.by_hand.items() if mine == hand and seconds_of(name, seconds[hand]) is None]
        print(f"{len(unknown)} tests that {what} are not measured:", *unknown[: 10 * (1 - hand)], sep="\n    ")


def _write(both: tuple[Seconds, Seconds]) -> None:
    sorted_ones: dict[str, Any] = dict(zip(("sampled", "by hand"), both, strict=True))
    SECONDS.write_text(json.dumps(sorted_ones, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
