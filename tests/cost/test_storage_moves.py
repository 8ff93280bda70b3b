"""The table of moves: each tier has its way there and back, its price and its copy, and one more is a row."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from meshc.cost.devices import Link, device
from meshc.cost.links import copy_seconds
from meshc.ir import spmd
from meshc.ir.storage_moves import MOVES, OFFLOADED, OPERATORS, Storage
from meshc.runtime.comm.disk import COPIES


def test_each_tier_has_its_rows() -> None:
    assert get_args(Storage) == ("device", *OFFLOADED) == ("device", "host", "disk")
    assert MOVES.keys() == {way for one in OFFLOADED for way in (("device", one), (one, "device"))}
    assert COPIES.keys() == {("device", one) for one in OFFLOADED}
    assert spmd.HOST_COPIES.keys() == OPERATORS == {"to_host", "from_host"}


def test_a_planted_tier_has_the_price_of_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(device("h100"), host=Link(1e-5, 50e9), disk=Link(1e-4, 2e9))
    monkeypatch.setitem(MOVES, ("device", "tape"), replace(MOVES["device", "disk"], links=("disk_link",)))  # type: ignore[arg-type]
    assert copy_seconds(2e9, slow, "tape") == pytest.approx(1.0001)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        copy_seconds(2e9, slow, "shelf")  # type: ignore[arg-type]
