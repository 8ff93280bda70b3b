"""The examples of docs/add-a-schedule.md, run in order, print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from meshc.passes.schedules import names
from meshc.passes.schedules.kind import Kind

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "add-a-schedule.md").read_text()


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
    assert isinstance(scope["SCHEDULE"], Kind)


def test_the_page_names_them_all() -> None:
    assert all(f"`{name}`" in PAGE for name in names())
