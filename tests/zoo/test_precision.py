"""A sample of the families in few bits, as they run in `make precision`, and the table that it writes."""

from __future__ import annotations

import pytest

from tests.broad import broad
from tests.formats import SCALED
from tests.zoo.precision import REFUSED, cells, key, run, table

SAMPLE = (
    ("gpt2", "int8 row", "tp=3"), ("qwen3", "float8 block", "dp_shard=2,tp=2"), ("bert", "nvfp4", "dp_shard=3"),
    ("llama", "float8 mx", "pp=2,dp=2"), ("t5", "float8 tensor", "dp=2,cp=2"), ("mixtral", "float8 row", "dp=2,ep=2"),
)  # fmt: skip
SLOW = ("llama", "mixtral", "bert")


@pytest.mark.parametrize("cell", [(broad if cell[0] in SLOW else pytest.param)(cell, id=key(cell)) for cell in SAMPLE])
def test_a_family_in_few_bits_equals_one_device(cell: tuple[str, str, str]) -> None:
    assert cell in cells()
    found = run(*cell)
    assert found["outcome"] == "ok" and found["weights"] > 4 and found["error"] < 1e-10


def test_the_table_says_errors_and_refusals() -> None:
    rows = {key(cell): {"outcome": "ok", "error": 1e-15, "weights": 14} for cell in cells()}
    rows[key(("llama", "nvfp4", "pp=2,dp=2"))] = {"outcome": REFUSED, "why": "no"}
    told = table(rows)
    assert "1e-15, 1 refused" in told and f"{len(rows) - 1} of {len(rows)} cells equal one device" in told
    assert all(form in told for form in SCALED)
