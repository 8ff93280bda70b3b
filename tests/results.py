"""Rows of a long run, kept in out/ as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "out"


class Results:
    """`rows` by name, in out/NAME.json; `fresh` forgets what an earlier run has kept."""

    def __init__(self, name: str, fresh: bool) -> None:
        self.path = OUT / f"{name}.json"
        self.rows: dict[str, Any] = {} if fresh or not self.path.exists() else json.loads(self.path.read_text())

    def keep(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        scratch = self.path.with_suffix(".part")
        scratch.write_text(json.dumps(self.rows, indent=1))
        scratch.replace(self.path)
