"""A sample of the zoo, as it runs in `make zoo`, and the table that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broad import broad
from tests.coverage_page import put
from tests.zoo.operators import operators, used
from tests.zoo.run import MESHES, NAMES, run
from tests.zoo.table import key, table

SAMPLE = (
    ("t5", "dp=2,tp=2"), ("convnext", "tp=3"), ("unet", "tp=2"), ("transformer", "tp=3"), ("dlrm", "tp=2"), ("graph_network", "dp=2,tp=2"),
    ("mamba", "tp=2"),
)  # fmt: skip
"""One of each way to be unlike a decoder: two caches, channels, levels with skips, torch's own layers, bags, scatters, states."""


SLOW = ("t5", "convnext", "unet", "transformer", "mamba")


@pytest.mark.parametrize(
    "name, mesh", [(broad if cell[0] in SLOW else pytest.param)(*cell, id=key(*cell)) for cell in SAMPLE]
)
def test_a_family_means_what_it_means_and_is_split(name: str, mesh: str) -> None:
    row = run(name, mesh)
    assert (row["inference"], row["training"]) == ("ok", "ok")
    assert row["whole"] == []
    assert row["share_legal"]["tp"] >= 0.95, row["largest_whole"]


def test_the_list_of_operators_has_those_of_a_family() -> None:
    found = operators("mixer", train=True)
    assert found >= {"aten.addmm", "aten.native_layer_norm", "aten.gelu_backward"}
    assert found <= used()


def rows() -> dict[str, dict[str, object]]:
    good = {"inference": "ok", "training": "ok", "share": {"tp": 0.5}, "share_legal": {"tp": 0.9}, "seconds": 1.5, "whole": ["aten.odd"]}
    good["largest_whole"] = {"tp": ["aten.mm forward in head"]}
    bad = {"inference": "ok", "training": "RuntimeError: no | luck\nand more"}
    first, second = {"name": NAMES[0], "mesh": MESHES[0], **good}, {"name": NAMES[1], "mesh": "tp=4", **bad}
    return {key(NAMES[0], MESHES[0]): first, key(NAMES[1], "tp=4"): second}


def test_the_table_says_what_failed_what_fell_back_and_what_stayed_whole() -> None:
    told = table(rows())
    assert f"| {NAMES[0]} | ok | not run | not run | not run | 50.0 % | 90.0 % | 1.5 |" in told
    assert f"- {NAMES[1]} on `tp=4`, training: RuntimeError: no / luck\n" in told
    assert f"- `aten.odd`: {NAMES[0]}\n" in told and f"- {NAMES[0]}: aten.mm forward in head\n" in told
    assert "1 of 2 cells that were run are ok" in told


def test_the_table_takes_its_own_place_among_others(tmp_path: Path) -> None:
    page = tmp_path / "coverage.md"
    page.write_text("# Coverage\n\nbefore\n\n<!-- zoo: begin -->\nold\n<!-- zoo: end -->\n\nafter\n")
    put("zoo", table(rows()), page)
    text = page.read_text()
    assert text.startswith("# Coverage\n\nbefore\n") and text.endswith("\n\nafter\n") and "old" not in text
    put("zoo", table(rows()), page)
    assert page.read_text() == text
