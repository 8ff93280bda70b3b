"""Meshes that so many devices may be."""

from __future__ import annotations

from math import prod

import pytest

from meshc.plan.factorizations import factorizations


def texts(devices: int, node: int, stages: bool = True) -> list[str]:
    return [",".join(map(str, axes)) for axes in factorizations(devices, node, stages)]


def test_many_nodes() -> None:
    assert texts(512, 8) == [
        "dp=64,tp=8", "dp=128,tp=4", "dp=256,tp=2", "dp=512", "dp=8,dp_shard=8,tp=8",
        "pp=2,dp=32,tp=8", "pp=4,dp=16,tp=8", "pp=8,dp=8,tp=8",
    ]  # fmt: skip


def test_one_node_and_one_device() -> None:
    assert texts(8, 8, stages=False) == ["tp=8", "dp=2,tp=4", "dp=4,tp=2", "dp=8"]
    assert texts(1, 8) == ["dp=1"]


@pytest.mark.parametrize("devices, node", [(1, 8), (3, 8), (6, 4), (12, 8), (96, 8), (4096, 8), (7, 2)])
def test_each_has_all_devices_once_and_no_name_is_too_large_for_a_node(devices: int, node: int) -> None:
    found = factorizations(devices, node)
    assert len(set(found)) == len(found) <= 8
    for axes in found:
        assert prod(axis.size for axis in axes) == devices
        assert all(axis.size <= node for axis in axes if axis.name == "tp")
