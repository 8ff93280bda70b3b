"""Fitting gives back the figures that made the measurements; what is measured is kept and found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshc import environment
from meshc.cost import device_calibration, device_fit, microbenchmarks
from meshc.cost.device_calibration import BETWEEN, INSIDE
from meshc.cost.device_fit import Product, TimedSample
from meshc.cost.devices import DTYPES, Link, device, devices_of, read_devices, write_devices
from meshc.cost.links import fastest
from meshc.errors import StateError
from meshc.ir.mesh import Mesh
from tests.runtime.launch import launch

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)


def test_a_rate_is_found_beneath_its_overhead() -> None:
    points = [(work, 2e-6 + work / 5e10) for work in (1e5, 1e7, 1e9)]
    found = device_fit.rate(points, 2e-6)
    assert found.figure == pytest.approx(5e10) and found.error == pytest.approx(0, abs=1e-9)


def test_small_and_large_sizes_count_alike() -> None:
    """Two measurements that contradict each other meet in the middle, although one is a thousand times the other."""
    found = device_fit.rate([(1e6, 1e6 / 1e9), (1e9, 1e9 / 3e9)], 0.0)
    assert 1e9 < found.figure < 3e9 and found.error > 0.1


def test_a_rate_needs_something_that_takes_time() -> None:
    with pytest.raises(StateError, match="longer than the overhead"):
        device_fit.rate([(1.0, 1e-6)], 1e-5)


def test_what_products_move_is_told_from_what_they_multiply() -> None:
    shapes = [(128, 128, 128), (1024, 1024, 1024), (32, 1024, 1024), (1024, 64, 1024)]
    points = [(2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)) for m, k, n in shapes]
    found, per_byte_s = device_fit.products([Product(flops, moved, 1e-6 + flops / 9e10 + moved * 1.2e-10) for flops, moved in points], 1e-6)
    assert found.figure == pytest.approx(9e10) and per_byte_s == pytest.approx(1.2e-10) and found.error == pytest.approx(0, abs=1e-9)
    squares = [Product(flops, moved, 1e-6 + flops / 9e10) for flops, moved in points]
    found, per_byte_s = device_fit.products(squares, 1e-6)
    assert found.figure == pytest.approx(9e10) and per_byte_s == pytest.approx(0, abs=1e-15)
    with pytest.raises(StateError, match="longer than the overhead"):
        device_fit.products(squares, 1.0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("truth", [Link(5e-5, 2e9), Link(2e-6, 3e11)])
@pytest.mark.parametrize("overhead_s", [0.0, 2e-5])
def test_a_link_is_found_whichever_way_its_collectives_take(ranks: int, truth: Link, overhead_s: float) -> None:
    samples = [
        TimedSample("all_reduce", ranks, size, overhead_s + fastest("all_reduce", ranks, size, truth).seconds(truth)) for size in SIZES
    ] + [TimedSample("send", 2, size, truth.latency_s + size / truth.bandwidth_Bps) for size in SIZES]
    found, overhead, error = device_fit.link(samples)
    assert found.latency_s == pytest.approx(truth.latency_s, rel=1e-3) and overhead == pytest.approx(overhead_s, rel=1e-3, abs=1e-9)
    assert found.bandwidth_Bps == pytest.approx(truth.bandwidth_Bps, rel=1e-3) and error < 1e-3


def test_noise_moves_a_link_by_no_more_than_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = (0.9 + 0.2 * torch.rand(len(SIZES), generator=generator)).tolist()
    samples = [TimedSample("send", 2, size, part * (5e-5 + size / 2e9)) for size, part in zip(SIZES, noise, strict=True)]
    found, _, error = device_fit.link(samples)
    assert 0.9 * 5e-5 <= found.latency_s <= 1.1 * 5e-5 and 0.9 * 2e9 <= found.bandwidth_Bps <= 1.12 * 2e9 and error < 0.2


def test_twice_and_half_are_equally_wrong() -> None:
    """Messages of one size took 1 and 4 ms: the link says 2."""
    found, _, error = device_fit.link([TimedSample("send", 2, 1 << 25, 1e-3), TimedSample("send", 2, 1 << 25, 4e-3)])
    assert found.latency_s + (1 << 25) / found.bandwidth_Bps == pytest.approx(2e-3, rel=0.02) and error == pytest.approx(1.0, rel=0.05)


def test_a_link_without_latency_has_none() -> None:
    found, _, _ = device_fit.link([TimedSample("send", 2, size, size / 1e9 * (0.5 if size == SIZES[0] else 1)) for size in SIZES])
    assert found.latency_s == 0.0 and found.bandwidth_Bps == pytest.approx(1e9, rel=0.4)


def test_a_link_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(StateError, match="larger messages did not take longer"):
        device_fit.link([TimedSample("send", 2, 1 << 20, 2e-3), TimedSample("send", 2, 1 << 25, 1e-3)])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring that ends at once: what is measured is not judged here."""
    monkeypatch.setattr(microbenchmarks, "BATCH_S", 1e-4)
    monkeypatch.setattr(microbenchmarks, "SQUARES", {"cpu": (64, 128)})
    monkeypatch.setattr(microbenchmarks, "THIN", {"cpu": ((8, 128, 128),)})
    monkeypatch.setattr(microbenchmarks, "VECTORS", {"cpu": (1 << 16, 1 << 18)})
    monkeypatch.setattr(microbenchmarks, "WORKING_SET", 1 << 20)


@pytest.mark.usefixtures("quick")
def test_a_calibration_is_kept_beside_others_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "devices.toml"
    other = replace(device("h200"), source="measured elsewhere")
    write_devices([other], path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    truth = Link(4e-5, 1.5e9)
    samples = {INSIDE: [TimedSample("send", 2, size, truth.latency_s + size / truth.bandwidth_Bps) for size in SIZES]}
    found = device_calibration.calibrate(torch.device("cpu"), device_calibration.Links(samples, 1.25, 0.01), path)
    device_calibration.keep(found, path)
    one = read_devices(path)["cpu"]
    assert read_devices(path)["h200"] == other
    assert one.inside_node.latency_s == pytest.approx(4e-5) and one.inside_node.bandwidth_Bps == pytest.approx(1.5e9)
    assert one.between_nodes == device("cpu").between_nodes and one.ranks_per_node == 2
    assert one.source.startswith("measured on ") and all(one.flops_per_s[dtype] > 0 for dtype in DTYPES)
    assert (one.contention, one.uneven) == (1.25, 0.01)
    table = found.table()
    assert "computing loses beside" in table and "125 % of what a collective takes" in table
    assert "ranks are apart after 10 ms" in table and "1.00 ms" in table
    assert "link inside a node, 2 ranks  40.0 us, 1.50 GB/s" in table and f"link {BETWEEN}" in table and "not measured" in table
    monkeypatch.setenv(environment.DEVICES, str(path))
    assert devices_of(Mesh("dp=2")).slowest() == one
    again = device_calibration.calibrate(torch.device("cpu"), None, path)  # without a process group the links stay as they were measured
    assert again.device.inside_node == one.inside_node and again.device.ranks_per_node == 2
    assert (again.device.contention, again.device.uneven) == (1.25, 0.01)


def test_a_dtype_without_a_fast_kernel_is_not_tried_at_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmarks, "measure_seconds", lambda run, device: 1.0)
    assert microbenchmarks.products(torch.device("cpu"), torch.float16) == [Product(2.0 * 128**3, 2.0 * 3 * 128**2, 1.0)]


@pytest.mark.processes
def test_the_command_measures_links_under_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    done = launch("tests.runtime.programs:calibrated", str(path), ranks=2, timeout_s=120, environment={"LOCAL_WORLD_SIZE": "2"})
    assert done.ok, done
    said = "".join(end.out for end in done.ranks)
    assert said.count(f"written to {path}") == 1 and "link inside a node, 2 ranks" in said
    one = read_devices(path)["cpu"]
    assert "contention = " in path.read_text() and "uneven = " in path.read_text() and "computing loses beside" in said
    assert one.ranks_per_node == 2 and one.inside_node != device("cpu").inside_node
