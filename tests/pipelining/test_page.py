"""The examples of docs/add-a-schedule.md, run in order, print what the page says; docs/pipelines.md's table is what schedules do."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from meshc.passes.phases.schedule_kind import ScheduleKind
from meshc.passes.stages.schedules import build, names
from meshc.pipelining.timing import equal_costs, simulate

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGE = (DOCS / "add-a-schedule.md").read_text()
TABLE = re.findall(r"\| `(\w+)` \| .* \| ([^|]*) \| ([\d.]+) % \| ([\d.]+) % \|\n", (DOCS / "pipelines.md").read_text())


def test_the_page_prints_what_it_says() -> None:
    scope: dict[str, Any] = {}
    blocks = re.findall(r"```(python|text)\n(.*?)```\n", PAGE, re.DOTALL)
    assert [kind for kind, _ in blocks].count("text") == 3
    printed = ""
    for kind, block in blocks:
        if kind == "python":
            assert printed == "", "what an example prints is shown"
            with contextlib.redirect_stdout(out := io.StringIO()):
                exec(compile(block, "docs/add-a-schedule.md", "exec"), scope)
            printed = out.getvalue()
        else:
            assert block == printed
            printed = ""
    assert isinstance(scope["SCHEDULE"], ScheduleKind)


def test_the_page_names_them_all() -> None:
    assert all(f"`{name}`" in PAGE for name in names())


def test_the_table_has_them_all() -> None:
    assert sorted(row[0] for row in TABLE) == sorted(names())


@pytest.mark.parametrize("name, holds, eight, sixteen", TABLE)
def test_the_table_says_what_schedules_do(name: str, holds: str, eight: str, sixteen: str) -> None:
    for microbatches, idle in ((8, eight), (16, sixteen)):
        schedule = build(name, 4, microbatches)
        each = schedule.stages // 4
        timeline = simulate(schedule, equal_costs(schedule.stages))
        assert f"{100 * timeline.bubble:.1f}" == idle
        known = {
            "m": [microbatches] * 4, "p - r": [4, 3, 2, 1], "p": [4] * 4, "p + 1/2": [4.5] * 4, "nothing": [0] * 4,
            "p + (p-1-2r)/v": [4 + (3 - 2 * rank) / 2 for rank in range(4)],
        }  # fmt: skip
        assert [peak / each for peak in timeline.peaks()] == known[holds]
