"""docs/coverage.md holds several tables, each between two markers of its own."""

from __future__ import annotations

import argparse
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


def left_alone(parser: argparse.ArgumentParser, arguments: argparse.Namespace, missing: int, page: Path = PAGE) -> bool:
    """Whether a table stays as it is, and why, printed: the command was told to leave something out, or has no row for some of it.

    Options that stop a run or forget earlier ones leave nothing out; what they leave undone is `missing`.
    """
    given = vars(arguments).items()
    filters = [f"--{name}" for name, value in given if name not in ("fresh", "limit_seconds", "show") and value != parser.get_default(name)]
    if not filters and not missing:
        return False
    why = f"this run was told {', '.join(filters)}" if filters else f"{missing} of its rows are missing"
    print(f"docs/{page.name} is as it was: {why}; the command without filters, run to its end, writes it")
    return True
