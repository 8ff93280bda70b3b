"""Every block of Python on every page runs, as it stands. (`tests/test_docs.py` looks at what pages name.)"""

from __future__ import annotations

from itertools import chain

import pytest

from tests.broad import broad
from tests.processes.pages import DOCS, blocks
from tests.processes.scenes import ELSEWHERE, QUOTED, SCENES
from tests.runtime.launch import ROOT, launch

pytestmark = pytest.mark.processes

PAGES = ["../README.md", *sorted(page.name for page in DOCS.glob("*.md"))]
FOREIGN = "py"
"""Python of frameworks that are not installed here."""
NO_CODE = {"text", "toml", "sh", "diff"}
"""toml: `tests/cost/test_devices.py` reads it. sh: `tests/test_docs.py` looks up what it calls."""
OFTEN = [scene for scene in SCENES if scene.often]
"""On one rank each: one launch runs them all."""


@pytest.mark.parametrize(
    "names, ranks",
    [([scene.name for scene in OFTEN], 1), *(broad([scene.name], scene.ranks) for scene in SCENES if not scene.often)],
    ids=["often", *(scene.name for scene in SCENES if not scene.often)],
)
def test_what_a_page_shows_runs(names: list[str], ranks: int) -> None:
    ended = launch("tests.processes.pages:run", *names, ranks=ranks, timeout_s=240)
    assert ended.ok, ended
    assert [line for line in ended.ranks[0].out.splitlines() if line.startswith("ran ")] == [f"ran {name}" for name in names]


def test_every_block_is_run_once_or_is_no_code() -> None:
    assert {block.kind for page in PAGES for block in blocks(page)} <= {"python", FOREIGN, *NO_CODE}
    there = {page: list(range(len(blocks(page, "python")))) for page in PAGES if blocks(page, "python")}
    run = {page: sorted(chain.from_iterable(scene.blocks for scene in SCENES if scene.page == page)) for page in there}
    for page, number in QUOTED:
        run[page] = sorted([*run[page], number])
    assert run | {page: list(range(count)) for page, (count, _) in ELSEWHERE.items()} == there
    assert {scene.ranks for scene in OFTEN} == {1}


@pytest.mark.parametrize("page, test", [(page, test) for page, (_, test) in ELSEWHERE.items()])
def test_what_runs_elsewhere_runs_there(page: str, test: str) -> None:
    assert page in (ROOT / test).read_text()


@pytest.mark.parametrize("page, number", QUOTED)
def test_what_is_quoted_stands_in_its_file(page: str, number: int) -> None:
    text = blocks(page, "python")[number].text
    assert all(line.strip() in (ROOT / QUOTED[page, number]).read_text() for line in text.splitlines())


def test_only_other_frameworks_code_is_not_run() -> None:
    assert [page for page in PAGES if blocks(page, FOREIGN)] == ["from-deepspeed.md", "from-megatron.md"]
