"""Sizes of memory as people write them."""

from __future__ import annotations

import pytest

import meshc
from meshc.ir.quantities import read_bytes


@pytest.mark.parametrize(
    "text, size",
    [
        ("80GB", 80 * 10**9), ("80 GiB", 80 << 30), (" 1.5 tb ", 1_500_000_000_000), ("512MB", 512_000_000),
        ("7", 7), ("7 B", 7), ("2kib", 2048),
    ],
)
def test_units(text: str, size: int) -> None:
    assert read_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["", "GB", "80 Gb/s", "-1GB", "80 XB", "1e9", "9" * 30])
def test_what_is_no_size_is_refused_with_where_it_stands(text: str) -> None:
    with pytest.raises(meshc.PlanError, match="Options.memory_budget=....: .* is no size of memory; write it as 80GB, 40 GiB or a number"):
        meshc.Options(memory_budget=text)


def test_an_option_holds_bytes_however_they_are_written() -> None:
    assert meshc.Options(memory_budget="80GB") == meshc.Options(memory_budget=80_000_000_000)
    with pytest.raises(meshc.PlanError, match="at least 1"):
        meshc.Options(memory_budget="0GB")
