"""docs/coverage.md holds several tables, each between two markers of its own."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"
TITLE = "# Coverage\n\nWhat was tried, and what came of it. Each table says which command wrote it.\n"


def put(name: str, section: str, page: Path = PAGE) -> None:
    """A section of the page, where it stood or at the end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->\n"
    text = page.read_text() if page.exists() else TITLE
    if begin in text:
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
    else:
        before, after = text.rstrip("\n") + "\n\n", ""
    page.write_text(f"{before}{begin}\n{section}{end}{after}")
