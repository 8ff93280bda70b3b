"""Alpha-beta of collectives, on figures that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshc.cost.devices import Link
from meshc.cost.links import across_and_inside, collective_seconds, fastest, link_of, payload, rows_by_link, send_seconds, ways
from meshc.ir import spmd
from meshc.ir.mesh import Mesh
from tests.cost.building import ROUND, Building

LINK = Link(1e-5, 1e9)


def test_a_message() -> None:
    assert send_seconds(1e6, LINK) == pytest.approx(1e-5 + 1e-3)


def test_every_way_of_an_all_reduce() -> None:
    found = {way.name: (way.steps, way.moved) for way in ways("all_reduce", 8, 800.0)}
    assert found == {"ring": (14, 1400.0), "tree": (6, 1600.0), "direct": (1, 5600.0)}


@pytest.mark.parametrize("size, name", [(8, "direct"), (40_000, "tree"), (100_000_000, "ring")])
def test_the_fastest_way_depends_on_the_size(size: int, name: str) -> None:
    assert fastest("all_reduce", 8, size, LINK).name == name


def test_two_ranks_swap_what_they_have() -> None:
    for size in (8, 1 << 28):
        assert fastest("all_reduce", 2, size, LINK).seconds(LINK) == pytest.approx(1e-5 + size / 1e9)


def test_a_reduction_and_a_gather_are_an_all_reduce() -> None:
    (reduced,), (gathered,) = ways("reduce_scatter", 6, 600.0), ways("all_gather", 6, 600.0)
    ring = ways("all_reduce", 6, 600.0)[0]
    assert (reduced.steps + gathered.steps, reduced.moved + gathered.moved) == (ring.steps, ring.moved)
    assert fastest("all_to_all", 6, 600.0, LINK).seconds(LINK) == pytest.approx(1e-5 + 500 / 1e9)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_more_bytes_and_more_ranks_take_longer(kind: str) -> None:
    def takes(ranks: int, size: float) -> float:
        return fastest(kind, ranks, size, LINK).seconds(LINK)

    assert all(takes(n, 1e6) < takes(n, 2e6) for n in (2, 3, 8, 64))
    assert all(takes(n, 1e6) < takes(2 * n, 1e6) for n in (2, 3, 8, 64))


def test_an_axis_knows_whether_it_stays_in_its_node() -> None:
    """16 ranks on nodes of 4: tp's neighbours share a node, cp's have one other in theirs, dp's are alone."""
    mesh = Mesh("dp=4,cp=2,tp=2")
    inside, between = ROUND.links
    assert link_of(mesh, ["tp"], ROUND) == inside and link_of(mesh, ["cp"], ROUND) == inside
    assert link_of(mesh, ["cp", "tp"], ROUND) == inside
    assert link_of(mesh, ["dp"], ROUND) == Link(between.latency_s, between.bandwidth_Bps)
    assert link_of(mesh, ["dp", "tp"], ROUND) == Link(between.latency_s, 2 * between.bandwidth_Bps)
    far = Mesh.from_axes([("a", 2), ("b", 2)], ranks=[0, 4, 1, 5])  # a rank table that puts neighbours apart
    assert link_of(far, ["b"], ROUND) == between and link_of(far, ["a"], ROUND) == inside
    many_ports = replace(ROUND, between_nodes=Link(1e-4, 9e8))
    assert link_of(mesh, ["dp", "tp"], many_ports).bandwidth_Bps == inside.bandwidth_Bps  # no faster than inside


def test_a_collective_of_a_graph() -> None:
    b = Building()
    mesh = Mesh("dp=2,tp=4")
    x = b.given(1000, 1000)
    reduced = b.call(spmd.all_reduce, x, ["tp"], "sum", made=(1000, 1000))
    gathered = b.call(spmd.all_gather, x, ["tp"], 0, made=(4000, 1000))
    turned = b.call(spmd.all_to_all, x, ["dp"], 0, 1, made=(500, 2000))
    assert [payload(node, {}) for node in (reduced, gathered, turned)] == [4_000_000, 16_000_000, 4_000_000]
    assert collective_seconds(reduced, mesh, ROUND) == pytest.approx(1e-6 + 6e-5 + 1.5 * 4e-3)
    assert collective_seconds(gathered, mesh, ROUND) == pytest.approx(1e-6 + 3e-5 + 0.75 * 16e-3)
    assert collective_seconds(turned, mesh, ROUND) == pytest.approx(1e-6 + 1e-4 + 0.5 * 4e-3 / 0.1)  # dp leaves the node
    together = b.call(spmd.all_reduce, x, ["mb"], "sum", made=(1000, 1000))
    alone = b.call(spmd.all_reduce, x, ["dp"], "sum", made=(1000, 1000))
    assert collective_seconds(together, mesh, ROUND) == 0 == collective_seconds(alone, Mesh("dp=1,tp=4"), ROUND)


def test_a_halo_moves_what_is_missing() -> None:
    b = Building()
    x = b.given(4, 8, 16, dtype=torch.float32)  # dim 1 of 16 over 2 ranks, a kernel of 3: a row from the neighbour
    window = b.call(spmd.halo, x, ["cp"], 1, 16, [16, 1, -1, 10], 0.0, made=(4, 10, 16))
    assert payload(window, {"cp": 2}) == 4 * 4 * 16
    assert collective_seconds(window, Mesh("cp=2"), ROUND) == pytest.approx(1e-6 + 1e-5 + 256 / 1e9)


def test_a_shift_along_a_ring_is_one_message_and_leaves_the_node_by_one_port() -> None:
    b = Building()
    x = b.given(1000, 1000)
    near, far = (b.call(spmd.ring_shift, x, [axis], 1, made=(1000, 1000)) for axis in ("tp", "dp"))
    mesh = Mesh("dp=2,tp=4")
    assert collective_seconds(near, mesh, ROUND) == pytest.approx(1e-6 + 1e-5 + 4e-3)
    assert collective_seconds(far, mesh, ROUND) == pytest.approx(1e-6 + 1e-4 + 4e-3 / 0.1)
    across = b.call(spmd.to_zigzag, x, ["tp"], 0, made=(1000, 1000))
    assert collective_seconds(across, mesh, ROUND) == pytest.approx(1e-6 + 1e-5 + 2e-3), "one message too, of a half"
    both = b.call(spmd.ring_shift, x, ["dp", "tp"], 1, made=(1000, 1000))
    assert collective_seconds(both, mesh, ROUND) == collective_seconds(far, mesh, ROUND), "four ports, of which one carries it"


def test_rows_to_other_nodes_take_a_ranks_own_port() -> None:
    """A token in two goes to each of eight ranks, four of a node: of seven others three are near."""
    mesh = Mesh("dp=2,ep=8")
    b = Building()
    tokens, choice = b.given(4, 10), b.given(32, 1, dtype=torch.int64)
    rows = b.call(spmd.gather_rows, tokens, ["ep"], choice, 1, 0.5, made=(1, 32, 10))
    inside, between = ROUND.links
    size = 0.5 * 7 / 8 * 32 * 10 * 4
    near, far = rows_by_link(rows, mesh, ROUND)
    assert (near, far) == (pytest.approx(size * 3 / 7), pytest.approx(size * 4 / 7))
    wanted = max(send_seconds(near, inside), send_seconds(far, between))
    assert collective_seconds(rows, mesh, ROUND) == pytest.approx(ROUND.collective_s + wanted)


@pytest.mark.parametrize("mesh, axes, wanted", [
    ("dp=2,a=2,b=4", ["a", "b"], (("a",), ("b",))),
    ("a=2,b=2,c=2", ["a", "b", "c"], (("a",), ("b", "c"))),
    ("a=4,b=2,c=2", ["a", "b"], (("a",), ("b",))),
    ("a=2,b=4", ["b", "a"], None),  # inside first
    ("a=2,b=2", ["a", "b"], None),  # one node
    ("a=8", ["a"], None),
])  # fmt: skip
def test_axes_come_apart_where_they_lead_across_first(mesh: str, axes: list[str], wanted: object) -> None:
    assert across_and_inside(Mesh(mesh), axes, ROUND) == wanted
