"""The pages for people who come from elsewhere: their Python runs as it stands. (`tests/test_docs.py` looks at that of all pages.)"""

from __future__ import annotations

import pytest

from tests.broad import broad
from tests.processes.pages import DOCS, blocks
from tests.runtime.launch import launch

pytestmark = pytest.mark.processes

RANKS = {"from-ddp.md": 3, "from-fsdp2.md": 3, "from-deepspeed.md": 1, "from-megatron.md": 1, "weights.md": 2}
ALONE = {"which-plan.md": 1, "losses-differ.md": 2, "does-not-compile.md": 1}
FIRST = {"generation.md": 1}
README = {"../README.md": 1}
"""Of the last two pages the further blocks are sketches."""


@pytest.mark.parametrize(
    "pages, ranks", [broad(RANKS, 2), (ALONE, 1), broad(FIRST, 2), broad(README, 4)], ids=["ranks", "one process", "generation", "readme"]
)
def test_what_a_page_shows_runs(pages: dict[str, int], ranks: int) -> None:
    ended = launch("tests.processes.pages:run", *(f"{page}:{count}" for page, count in pages.items()), ranks=ranks, timeout_s=240)
    assert ended.ok, ended
    assert [line for line in ended.ranks[0].out.splitlines() if line.startswith("ran ")] == [f"ran {page} {n}" for page, n in pages.items()]


def test_every_block_of_a_page_that_compares_is_run() -> None:
    compared = {page.name for page in DOCS.glob("from-*.md")} | {*ALONE, "weights.md"}
    assert {page: len(blocks(page)) for page in compared} == {**RANKS, **ALONE}
