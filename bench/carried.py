"""Tables that a page of the docs carries: what stands there between two comments is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"
END: Final = "<!-- to here -->"


def carry(page: str, script: str, shown: str) -> None:
    """The page of docs/ that has `<!-- written by SCRIPT -->` carries `shown` from there on, up to the next `<!-- to here -->`."""
    file, begin = DOCS / page, f"<!-- written by {script} -->"
    before, rest = file.read_text().split(begin)
    after = rest.partition(END)[2]
    file.write_text(f"{before}{begin}\n\n{shown}\n\n{END}{after}")
