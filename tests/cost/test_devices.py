"""Devices as data: the table is whole and says where its figures come from; what is measured is found again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshc import environment
from meshc.cost import devices
from meshc.cost.devices import DTYPES, EIGHT_BITS, TABLE, Link, device, devices_of, name_of, read_devices, write_devices
from meshc.errors import ArtifactError, PlanError
from meshc.ir.mesh import Mesh

NAMES = ("cpu", "a100", "h100", "h200", "b200")
WITH_EIGHT_BITS = ("h100", "h200", "b200")


def test_the_table_has_every_figure_of_every_device() -> None:
    assert tuple(read_devices(TABLE)) == NAMES
    for one in map(device, NAMES):
        assert {*DTYPES} <= {*one.flops_per_s} <= {*DTYPES, EIGHT_BITS} and (EIGHT_BITS in one.flops_per_s) == (one.name in WITH_EIGHT_BITS)
        figures = [*one.flops_per_s.values(), one.memory_Bps, one.memory_bytes, one.launch_s, one.collective_s]
        figures += [one.attention_keys, one.ranks_per_node]
        figures += [figure for link in (one.inside_node, one.between_nodes) for figure in (link.latency_s, link.bandwidth_Bps)]
        assert min(figures) > 0 and one.source
        assert all(0 < part <= 1 for part in vars(one.efficiency).values())


def test_every_figure_says_where_it_comes_from() -> None:
    """A CPU is its own host, and has a disk."""
    lines = [line for line in TABLE.read_text().splitlines() if "=" in line and not line.startswith(("source", "#"))]
    assert len(lines) == len(NAMES) * (6 + 4 + 4 + 2 + 2) + (len(NAMES) - 1) * (2 + 3) + 2 + len(WITH_EIGHT_BITS)
    assert [line for line in lines if not re.search(r"  # (https://|chosen|the |tuning\.cc)", line)] == []
    for section in re.split(r"\n(?=\[\w+\]\n)", TABLE.read_text())[2:]:  # of a GPU
        assert section.count("https://") >= 2, section


def test_figures_of_the_data_sheets() -> None:
    """Facts that anybody can look up: H200 is H100 with other memory; NVLink's 900 GB/s are both directions."""
    h100, h200 = device("h100"), device("h200")
    assert h100.flops_per_s == h200.flops_per_s and h100.flops_per_s["bfloat16"] == 989e12
    assert (h100.memory_Bps, h200.memory_Bps, h100.inside_node.bandwidth_Bps) == (3.35e12, 4.8e12, 450e9)
    assert device("a100").flops_per_s["float32"] == 19.5e12  # no TF32


def test_efficiency_stands_apart_from_peaks() -> None:
    one = device("h100")
    assert one.rate(torch.bfloat16) == pytest.approx(0.65 * 989e12)
    assert one.rate(torch.int64) == one.rate(torch.float32) == pytest.approx(0.65 * 67e12)
    assert one.bytes_per_s == pytest.approx(0.88 * 3.35e12)
    assert one.links[0] == Link(1.9e-6, pytest.approx(0.8 * 450e9))


def test_the_link_to_the_host_is_kept_where_there_is_one(tmp_path: Path) -> None:
    """A CPU is its own host."""
    write_devices([device("cpu"), device("h100")], tmp_path / "devices.toml")
    found = read_devices(tmp_path / "devices.toml")
    assert found["cpu"].host is None and found["cpu"].host_link is None
    assert found["h100"].host == device("h100").host == Link(10e-6, 64e9)
    assert found["h100"].host_link == Link(10e-6, pytest.approx(0.8 * 64e9))


def test_operators_on_the_host_have_its_figures(tmp_path: Path) -> None:
    one = device("h100")
    assert one.there.bytes_per_s == pytest.approx(device("cpu").efficiency.memory * 76.8e9)
    assert one.there.rate(torch.float64) == one.there.rate(torch.bfloat16) == pytest.approx(0.75 * 1.8e12)
    write_devices([one, replace(one, name="other", processor=None)], tmp_path / "devices.toml")
    found = read_devices(tmp_path / "devices.toml")
    assert found["h100"].processor == one.processor and found["other"].there == device("cpu") == device("cpu").there


def test_the_device_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/cost-model.md, A device of your own: the section as it stands there, beside those of the table."""
    page = (TABLE.parent.parent.parent / "docs" / "cost-model.md").read_text()
    path = tmp_path / "devices.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    monkeypatch.setenv(environment.DEVICES, str(path))
    assert devices.find_device("mi300x").rate(torch.bfloat16) == pytest.approx(0.5 * 1307.4e12)
    assert devices.find_device("b200") == device("b200")


def test_an_unknown_device_lists_those_that_there_are() -> None:
    with pytest.raises(PlanError, match="device 'h300'; there are cpu, a100, h100, h200, b200"):
        device("h300")


@pytest.mark.parametrize(
    "hardware, name",
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", "nvidia-gh200-480gb"),
    ],
)
def test_names_of_hardware(hardware: str, name: str) -> None:
    assert name_of(hardware) == name


def test_a_mesh_has_the_device_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_of(Mesh("dp=2")).slowest().name == "cpu" and devices_of(Mesh("dp=2 on cuda")).slowest().name == "h100"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for hardware, name, said in (("NVIDIA H200", "h200", "data sheets of H200"), ("NVIDIA L4", "h100", "nothing is known of NVIDIA L4")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda hardware=hardware: hardware)
        found = devices_of(Mesh("dp=2 on cuda")).slowest()
        assert found.name == name and found.source.startswith(said)


def test_what_was_measured_is_read_again_and_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "inner" / "devices.toml"
    monkeypatch.setenv(environment.DEVICES, str(path))
    assert devices.calibrated_devices() == {} and devices_of(Mesh("dp=2")).slowest() == device("cpu")
    measured = replace(device("cpu"), contention=1.25, uneven=0.01, product_moves=4.5)
    measured = replace(
        measured, memory_Bps=12.5e9, inside_node=Link(4.25e-5, 1.75e9), source='measured on a "machine" with a \\ in its name'
    )
    write_devices([measured], path)
    assert read_devices(path) == {"cpu": measured} and devices_of(Mesh("dp=2")).slowest() == measured
    assert device("cpu").memory_Bps == 10e9  # a name alone asks the table


def test_the_file_lies_where_settings_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.DEVICES, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert environment.device_file() == tmp_path / "meshc" / "devices.toml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert environment.device_file() == Path.home() / ".config" / "meshc" / "devices.toml"


def test_a_file_from_before_a_figure_was_has_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    write_devices([device("cpu")], path)
    later = ("contention", "uneven", "product_moves")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith(later)))
    assert read_devices(path) == {"cpu": device("cpu")}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_on_the_devices_of_the_table(name: str) -> None:
    """What is predicted for them is what it was before computing could lose anything to communicating, and ranks could be apart."""
    assert (device(name).contention, device(name).uneven, device(name).product_moves) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "change, said",
    [
        (("memory_Bps", "memory_bps"), r"\[cpu\]: memory_Bps missing, memory_bps unknown; put it right \(docs/cost-model.md\), or"),
        (("[cpu.inside_node]", "[cpu.within_node]"), r"\[cpu\]: inside_node missing, within_node unknown"),
        (("latency_s = ", "latency = "), r"\[cpu.inside_node\]: latency_s missing, latency unknown"),
        (("[cpu]", '[cpu]\nname = "cpu"'), r"\[cpu\]: name unknown"),
        (("bfloat16 = ", "bf16 = "), r"\[cpu.flops_per_s\]: bfloat16 missing"),
        (("contention = 0", "contention = 1000"), r"\[cpu\]: contention is 1000, more than 100; put it right"),
        (("product_moves = 0", "product_moves = -1"), r"\[cpu\]: product_moves"),
        (("uneven = 0", "uneven = -1"), r"\[cpu\]: uneven"),
        (("[cpu]", "[cpu"), "delete the file, and `meshc calibrate`"),
    ],
)
def test_a_file_at_fault_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "devices.toml"
    write_devices([device("cpu")], path)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ArtifactError, match=f"(?s){path}.*{said}"):
        read_devices(path)
