"""Optimizer state in files on the host's disk: it comes for its update and goes back, as from the host's memory."""
# ruff: noqa: E501 - lines of programs are as long as they are

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import meshc
from meshc import artifact
from meshc.cost import peak_memory
from meshc.cost.devices import Link
from meshc.cost.links import copy_seconds, host_copy_seconds
from meshc.errors import ArtifactError, PlanError, StateError
from meshc.ir import record, spmd
from meshc.plan.plan import Plan
from meshc.report import tree
from meshc.runtime.comm import disk
from meshc.text.parse import parse_one_type
from meshc.text.printer import hash_program, print_type
from tests.cost.building import ROUND
from tests.models import nanogpt
from tests.passes.memory.test_offload_state import Deep, around_without_numbers, momentum, step_of


def test_state_comes_from_the_disk_and_goes_back() -> None:
    model = nn.Linear(4, 3, bias=False)
    step = meshc.TrainStep(model, optimizer=momentum(model), loss=F.mse_loss)
    ask = {"input": torch.zeros(4, 4), "target": torch.zeros(4, 3)}
    assert_expected_inline(around_without_numbers("offload_state", step, line="offload state: disk", **ask), """\
- weight_momentum_buffer: "f32[weight.0 3, weight.1 4]" = "state:weight/momentum_buffer",
+ weight_momentum_buffer: "f32[weight.0 3, weight.1 4] disk" = "state:weight/momentum_buffer",
- sgd_default: "(f32[3, 4], f32[3, 4], f32[])" = meshc.sgd(weight, t_default_3, weight_momentum_buffer, weight_meshc_first, False, False)
+ from_host: "f32[weight.0 3, weight.1 4]" = from_host(weight_momentum_buffer)
+ sgd_default: "(f32[3, 4], f32[3, 4], f32[])" = meshc.sgd(weight, t_default_3, from_host, weight_meshc_first, False, False)
+ to_host: "f32[weight.0 3, weight.1 4] disk" = to_host(getitem_1, weight_momentum_buffer)
- "state:weight/momentum_buffer": getitem_1,
+ "state:weight/momentum_buffer": to_host,
""")


@pytest.mark.parametrize("line, why", [
    ("offload params: disk", "state can lie on the disk"),
    ("offload state, update: disk", "an update runs on what lies in the host's memory"),
    ("offload state: tape", "of state with `: disk` behind it"),
    ("offload state: disk now", "write one line for each"),
])  # fmt: skip
def test_what_cannot_be_said(line: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Plan(line)


def test_lines_are_written_as_they_are_read() -> None:
    text = "offload state h.0.*: disk\noffload state: disk"
    assert str(Plan(text)) == text and Plan({"offload": ["state h.0.*: disk", {"state": "disk"}]}) == Plan(text)
    assert str(Plan("offload state:disk\noffload state  h.* : disk")) == "offload state: disk\noffload state h.*: disk"
    assert str(Plan("offload params")) == "offload params" and Plan("offload state").offloads[0].storage == "host"


@cache
def deep(plan: str | None) -> meshc.Program:
    model = Deep()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    return meshc.compile(step, meshc.Mesh("dp=1"), plan=plan, args=(torch.zeros(4, 512),), kwargs={"target": torch.zeros(4, 512)})


def test_bytes_are_counted_apart_and_the_copies_are_those_of_the_host() -> None:
    on_disk, on_host, plain = map(deep, ("offload state: disk", "offload state", None))
    one, other, whole = (peak_memory.peak_rank(program.compiled) for program in (on_disk, on_host, plain))
    moments = 2 * 12 * 512 * 512 * 4
    assert one.beside == {"on the host, beside that": 0, "on its disk": moments} and one.peak == other.peak
    assert other.beside == {"on the host, beside that": moments, "on its disk": 0} and (one.host, other.host) == (0, moments)
    assert one.kept == other.kept and whole.kept["state"] - one.kept["state"] == moments
    copies = [
        [node.name for node in program.compiled.stage.graph.nodes if spmd.is_host_copy(node.target)] for program in (on_disk, on_host)
    ]
    assert copies[0] == copies[1] and len(copies[0]) == 48
    for program, where in ((on_disk, "its state on the disk"), (on_host, "its state on the host"), (plain, "")):
        (layers,) = tree.tree(program.compiled).children
        assert [leaf.where for leaf in layers.children[0].leaves if leaf.kind == "parameter"] == [where]
    summary = on_disk.summary()
    assert "on its disk" in summary and "on the disk" in summary and "on the host, beside that" not in summary


def test_a_step_means_what_it_means() -> None:
    program = step_of(nanogpt(torch.float64, layers=1), "dp_shard=2,tp=2", "offload state: disk", 2)
    kinds = {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert {"parameter after step 2", "state exp_avg after step 2"} <= kinds
    places = {record(node).storage for node in program.compiled.stages["after"].graph.nodes if node.target is spmd.to_host}
    assert places == {"disk"}


def test_a_saved_program_says_so(tmp_path: Path) -> None:
    program = deep("offload state: disk")
    program.save(tmp_path / "saved.meshc", weights=False)
    found = artifact.load(tmp_path / "saved.meshc")
    assert hash_program(found) == hash_program(program.compiled) and peak_memory.peak_rank(found) == peak_memory.peak_rank(program.compiled)
    text = "f32[8, 4] disk"
    read = parse_one_type(text)
    assert read.storage == "disk" and print_type(read) == text
    with pytest.raises(ArtifactError, match="say one of the two"):
        parse_one_type("f32[8, 4] host disk")


def test_an_operator_on_what_lies_on_the_disk_is_refused(tmp_path: Path) -> None:
    deep("offload state: disk").save(tmp_path / "saved.meshc", weights=False)
    (file,) = (tmp_path / "saved.meshc" / "stages").glob("*.py")
    text = file.read_text()
    line = next(line for line in text.splitlines() if " disk" in line and "to_host(" in line)
    file.write_text(text.replace(line, line.replace(' disk"', ' host"'), 1))
    with pytest.raises(ArtifactError, match=r"it gives state:\S+ as \S+ .* host, but .* disk"):
        artifact.load(tmp_path / "saved.meshc", allow_edited=True)
    line = next(line for line in text.splitlines() if "= from_host(" in line)
    file.write_text(text.replace(line, line.replace("from_host(", "aten.relu("), 1))
    with pytest.raises(ArtifactError, match="it reads what lies on the disk, or makes it: from_host and to_host alone do"):
        artifact.load(tmp_path / "saved.meshc", allow_edited=True)


def test_files_have_no_names_and_their_bytes_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_DISK", str(tmp_path))
    before = disk.HELD.now
    value = disk.copy_to_disk(torch.arange(1000.0), "w/exp_avg")
    assert disk.HELD.now == before + 4000 and value.sum() == 499500 and list(tmp_path.iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 1
    del value
    assert disk.HELD.now == before


def test_a_folder_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_DISK", str(tmp_path))
    with pytest.raises(StateError) as refusal:
        disk.empty((1 << 50,), torch.float32, "w/exp_avg")
    said = str(refusal.value)
    assert said.startswith("w/exp_avg cannot lie on the disk") and f"{tmp_path} has no room for {4 << 50:,} bytes more" in said
    assert "MESHC_DISK=FOLDER" in said
    monkeypatch.setenv("MESHC_DISK", str(tmp_path / "nowhere"))
    with pytest.raises(StateError, match="No such file or directory"):
        disk.empty((10,), torch.float32, "w/exp_avg")


def test_a_copy_takes_the_slower_of_the_two_ways() -> None:
    device = replace(ROUND, host=Link(1e-5, 50e9), disk=Link(1e-4, 2e9))
    assert copy_seconds(2e9, device, "disk") == pytest.approx(1.0001) and copy_seconds(2e9, device) < 0.05
    copy = next(node for node in deep("offload state: disk").compiled.stage.graph.nodes if node.target is spmd.from_host)
    assert host_copy_seconds(copy, device) == pytest.approx(1e-4 + 512 * 512 * 4 / 2e9)
