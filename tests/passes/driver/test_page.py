"""docs/architecture.md, The life of one tensor: what it shows of a program's text is what the passes write."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from meshc import environment

PAGE = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
SECTION = PAGE.partition("## The life of one tensor\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)


def shown() -> list[str]:
    """Lines of programs, without those that stand for others, and without Python that the runtime makes of them."""
    texts = [text for kind, text in BLOCKS if kind == "text" and not text.startswith("def run(")]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip() not in ("...", "")]


def test_every_line_that_is_shown_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = [text for kind, text in BLOCKS if kind == "python"]
    monkeypatch.setenv(environment.DUMP, str(tmp_path / "out"))
    for backend in ("eager", "inductor"):
        (tmp_path / "mlp.py").write_text(script.replace('"dp=2,tp=2"), ', f'"dp=2,tp=2"), backend="{backend}", '))
        runpy.run_path(str(tmp_path / "mlp.py"))
    written = {line.strip() for path in (tmp_path / "out").rglob("*.*") for line in path.read_text().splitlines()}
    assert len(shown()) > 20
    assert [line for line in shown() if not any(re.fullmatch(pattern(line), there) for there in written)] == []


def pattern(line: str) -> str:
    """`...` at a place of a line stands for anything; where a line comes from may be left out."""
    return ".*".join(map(re.escape, line.split("..."))) + r"(  # .*)?"
