"""The table of tiers: each has its links, its row of reports and its copy, and one more is a record, its link and its copy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import artifact
from meshc.check import host_values
from meshc.cost import peak_memory
from meshc.cost.devices import STORAGE_LINKS, Device, Link, device
from meshc.cost.links import copy_seconds
from meshc.errors import ArtifactError, PlanError
from meshc.ir import spmd
from meshc.ir.storage_moves import OPERATORS, TIERS, Storage, Tier
from meshc.plan.plan import Plan
from meshc.report.figures import figures
from meshc.report.memory_report import memory_table
from meshc.report.page import page
from meshc.runtime.comm.disk import COPIES
from meshc.runtime.state.changes import Changes
from meshc.text import parse
from meshc.text.printer import hash_program, print_stage, print_type

X = torch.linspace(-1, 1, 16).reshape(4, 4)
TEXT = '''@ranks("dp=2")
def main(
    m: "f32[8, 4] tape" = "state:w/exp_avg",
):
    d: "f32[8, 4]" = from_host(m)
    back: "f32[8, 4] tape" = to_host(d, m)
    return {
        "state:w/exp_avg": back,
    }
'''


def test_each_tier_has_its_record_its_links_and_its_copy() -> None:
    assert get_args(Storage) == ("device", *TIERS) == ("device", "host", "disk")
    assert COPIES.keys() == TIERS.keys() and STORAGE_LINKS == ("host", "disk")
    assert {field.name for field in fields(Device)} >= set(STORAGE_LINKS)
    assert spmd.HOST_COPIES.keys() == OPERATORS == {"to_host", "from_host"}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The tier `tape` is there, with a link of its own; what is copied to it is in the list."""
    found: list[str] = []

    def copy(tensor: Tensor, what: str, on: torch.device) -> Tensor:
        found.append(what)
        return tensor.clone()

    monkeypatch.setitem(TIERS, "tape", Tier(("tape",), "on its tape", state_only=True, compared=False))  # type: ignore[arg-type]
    monkeypatch.setitem(COPIES, "tape", copy)  # type: ignore[arg-type]
    monkeypatch.setattr(Device, "tape", Link(1e-3, 2e9), raising=False)
    for name in ("_ONE_TYPE", "_TYPES"):  # words of types are in these patterns
        monkeypatch.setattr(parse, name, re.compile(vars(parse)[name].pattern.replace("|disk|", "|disk|tape|")))
    yield found


def test_a_planted_tier_has_the_price_of_its_slowest_link(copied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(device("h100"), host=Link(2.0, 2.5e9))  # of which a program gets 0.8
    assert copy_seconds(2e9, slow, "tape") == pytest.approx(1.001)  # type: ignore[arg-type]
    monkeypatch.setitem(TIERS, "tape", Tier(("host", "tape"), "on its tape"))  # type: ignore[arg-type]
    assert copy_seconds(2e9, slow, "tape") == pytest.approx(3.0)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        copy_seconds(2e9, slow, "shelf")  # type: ignore[arg-type]


def test_a_plan_names_a_planted_tier(copied: list[str]) -> None:
    assert Plan("offload state h.*: tape").offloads[0].storage == "tape"
    text = "offload state: tape\noffload state: disk"
    assert str(Plan("offload state:tape\noffload state: disk")) == text == str(Plan({"offload": [{"state": "tape"}, "state: disk"]}))
    for line, why in (
        ("offload params: tape", "state can lie on the tape, which is read once a call: `offload state: tape`"),
        ("offload state, update: tape", "`offload state, update`, or `offload state: tape`"),
        ("offload state: shelf", "of state with `: disk` or `: tape` behind it"),
    ):
        with pytest.raises(PlanError, match=why):
            Plan(line)


def test_a_text_names_a_planted_tier_and_the_checker_refuses_what_cannot_be(copied: list[str]) -> None:
    assert print_type(parse.parse_one_type("f32[8, 4] tape")) == "f32[8, 4] tape"
    for two in ("host tape", "disk tape"):
        with pytest.raises(ArtifactError, match="what lies on the tape lies on the host: say one of the two"):
            parse.parse_one_type(f"f32[8, 4] {two}")
    sound = parse.parse_stage(TEXT)
    assert list(host_values.faults(sound)) == [] and print_stage(parse.parse_stage(print_stage(sound))) == print_stage(sound)
    for right, wrong, why in (
        ('"state:w/exp_avg",', '"parameter:w",', "parameter:w cannot lie on the tape; state can"),
        ('"f32[8, 4] tape" = to_host', '"f32[8, 4] host" = to_host', "what it makes lies on the tape, which its type does not say"),
        ('"f32[8, 4] tape" = to_host', '"f32[8, 4] disk" = to_host', "what it makes lies on the tape, which its type does not say"),
        ("to_host(d, m)", "to_host(d)", "what it makes lies in memory, and its type says the tape"),
        ("from_host(m)", "aten.relu(m)", "it reads what lies on the tape, or makes it: from_host and to_host alone do"),
    ):
        assert why in {told.split(": ", 1)[1] for _, told in host_values.faults(parse.parse_stage(TEXT.replace(right, wrong)))}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def step_of(mesh: dist.DeviceMesh, plan: str) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    return meshc.compile(step, mesh, plan=plan, args=(X,), kwargs={"target": X[:, :3]})


def test_state_in_a_planted_tier_is_counted_shown_saved_and_copied(
    copied: list[str], group: dist.DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_tape, on_host = (step_of(group, plan) for plan in ("offload state: tape", "offload state"))
    program = on_tape.compiled
    moments = 2 * 3 * 4 * 4  # two for each of 12 weights, of 4 bytes
    held, host = peak_memory.peak_rank(program), peak_memory.peak_rank(on_host.compiled)
    assert held.beside == {"on the host, beside that": 0, "on its disk": 0, "on its tape": moments}
    assert host.beside == {"on the host, beside that": moments, "on its disk": 0, "on its tape": 0}
    assert (held.host, host.host) == (0, moments) and held.kept == host.kept
    shown = memory_table(program)
    assert re.search(r"\n  on its tape +96 B\n", shown) and "on the host" not in shown and "on its disk" not in shown
    assert " 100 B on the tape\n" in on_tape.summary()  # a count of steps is state too, and stays on the device
    assert figures(program)["memory_bytes"]["on its tape"] == moments and ("on its tape", moments) in page(program, "planted").memory.kinds
    on_tape.save(tmp_path / "saved.meshc", weights=False)
    assert hash_program(artifact.load(tmp_path / "saved.meshc")) == hash_program(program)
    assert [on_tape(X, target=X[:, :3]).item() for _ in range(3)] == [on_host(X, target=X[:, :3]).item() for _ in range(3)]
    assert copied == ["weight/exp_avg", "weight/exp_avg_sq"]
    changes, other = on_tape.store.changes, on_host.store.changes
    monkeypatch.setattr(Changes, "ranks_of", lambda *_, **__: (0, 1))  # what one rank alone has is followed by nobody
    for one in (changes, other):
        one.renew()
        one.look()
    assert {held.name for held in changes._held} - {held.name for held in changes._compared_tensors()} == set(copied)
    assert other._compared_tensors() == other._held
