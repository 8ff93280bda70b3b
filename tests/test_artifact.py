"""Saved programs: what comes back, what is refused with which message, and that nothing saved is ever lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph

from meshc import artifact, ir
from meshc.artifact import load, open_weights, save
from meshc.errors import ArtifactError, FileError
from meshc.files import folders
from meshc.files.seal import seal_text
from meshc.ir import Record, Source, spmd
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from meshc.text.printer import print_program

aten = torch.ops.aten


def load_weights(path: Path, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Whole weights by name, all of them or those named."""
    with open_weights(path) as weights:
        return {name: weights.tensor(name) for name in (weights.names if names is None else names)}


def program(reason: str = "tp takes ffn") -> PlainProgram:
    sizes = {"dp": 2, "tp": 2, "mb": 2}
    w_at = Sharding(((Part("hidden", 6, ("dp",)),), (Part("ffn", 5, ("tp",)),)))
    y_at = Sharding(((), (Part("ffn", 5, ("tp",)),)), (("dp", "sum"),), frozenset({(1, 0)}))
    source = Source("model.py", 3, "return self.up(x)", "up")
    graph = Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    y = graph.call_function(aten.mm.default, (x, w))
    z = graph.call_function(spmd.all_reduce, (y, ["dp"], "sum"))
    graph.output((z, z))
    for node, sharding in ((w, w_at), (x, None), (y, y_at), (z, y_at.without_partial())):
        shape = (1, 3) if sharding is None else local_shape(sharding, sizes)
        ir.set_record(node, Record(shape, torch.float32, sharding, source, reason, "forward"))
    ports = (
        Port("parameter", "up.weight", (6, 5), torch.float32, w_at, requires_grad=True),
        Port("constant", "mask", (1, 3), torch.float32),
    )
    outputs = (Port("output", "logits", (1, 5), torch.float32, y_at.without_partial()),)
    return PlainProgram(
        {"main": Stage("main", graph, tuple(port.key for port in ports), ("output:logits", "part:logits"))},
        Mesh("dp=2,tp=2"),
        Plan("dp: hidden\ntp: ffn; store params"),
        ports,
        outputs,
        tuple(
            instruction
            for k in range(2)
            for instruction in (Instruction("run", "main", k), Instruction("add", "main", k, "part:logits", "sum:logits"))
        ),
        {"mask": torch.tensor([[1.0, 0.0, 2.0]])},
        sizes,
        2,
        "forward",
        ["factor seq is not in this model"],
        {"input_spec": {"x": [0, None]}, "model": object()},
    )


WEIGHT = torch.arange(30.0).view(6, 5)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(program(), tmp_path / "p.meshc", {"up.weight": WEIGHT, "tied": WEIGHT, "scale": torch.tensor(2.0)})
    return tmp_path / "p.meshc"


def rehash(folder: Path, name: str, text: str) -> None:
    """Replace a file and write its hash into the manifest, as someone would who wants it accepted."""
    (folder / name).write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    data = text.encode()
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(seal_text(manifest))


def change_manifest(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(seal_text(manifest | changes))


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        load(folder, **options)
    return str(caught.value)


def test_a_program_comes_back(saved: Path) -> None:
    first, again = program(), load(saved)
    assert print_program(again) == print_program(first)
    for name in ("mesh", "plan", "inputs", "outputs", "schedule", "axis_sizes", "microbatches", "mode", "notes"):
        assert getattr(again, name) == getattr(first, name), name
    assert again.info == {"input_spec": {"x": [0, None]}}
    assert torch.equal(again.constants["mask"], first.constants["mask"])
    for old, new in zip(first.stage.graph.nodes, again.stage.graph.nodes, strict=True):
        assert (old.name, old.meta.get(ir.KEY)) == (new.name, new.meta.get(ir.KEY))


def test_the_folder_is_the_same_each_time(saved: Path, tmp_path: Path) -> None:
    save(load(saved), tmp_path / "again", load_weights(saved))
    names = sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file())
    assert names == ["constants.safetensors", "manifest.json", "program.json", "stages/main.py", "weights.safetensors"]
    for name in names:
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    assert (saved / "stages/main.py").read_text().startswith('@ranks("dp=2,tp=2,mb=2")\ndef main(\n')


def test_weights_are_read_by_the_slice(saved: Path) -> None:
    assert load_weights(saved, ["scale"])["scale"] == 2 and load_weights(saved).keys() == {"up.weight", "tied", "scale"}
    with open_weights(saved) as weights:
        assert weights.shape("up.weight") == (6, 5)
        assert torch.equal(weights.slice("up.weight", [(3, 6), (3, 6)]), WEIGHT[3:6, 3:5])
        assert weights.slice("up.weight", [(0, 6), (5, 8)]).shape == (6, 0)
        assert weights.slice("scale", []) == 2
        with pytest.raises(ArtifactError, match=r"up.weight has shape \[6, 5\], which \[\(0, 6\)\] is no slice of"):
            weights.slice("up.weight", [(0, 6)])
        with pytest.raises(ArtifactError, match="has no tensor 'down'"):
            weights.tensor("down")


def test_damaged_weights_are_refused(saved: Path) -> None:
    data = bytearray((saved / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "weights.safetensors").write_bytes(data)
    assert load_weights(saved, ["scale"]) == {"scale": torch.tensor(2.0)}  # of which no byte has changed
    with pytest.raises(ArtifactError, match=r"(?s)weights.safetensors is not what .* up.weight .* save or copy the program again"):
        load_weights(saved)
    (saved / "weights.safetensors").write_bytes(data[:-1])
    assert "weights.safetensors is not what was saved" in refused(saved)


def test_weights_that_were_not_saved(tmp_path: Path) -> None:
    save(program(), tmp_path / "p")
    assert load(tmp_path / "p").mode == "forward"
    with pytest.raises(ArtifactError, match="was saved without weights; save it with them"):
        open_weights(tmp_path / "p")


@pytest.mark.parametrize("name", ["stages/main.py", "program.json"])
def test_an_edited_text_is_refused_unless_allowed(saved: Path, name: str) -> None:
    before = (saved / name).read_text()
    after = before.replace("mm_default", "product") if name.endswith(".py") else before.replace("factor seq is", "factor head is")
    assert before != after
    (saved / name).write_text(after)
    message = refused(saved)
    old, new = (hashlib.sha256(text.encode()).hexdigest()[:12] for text in (before, after))
    assert f"{saved / name} is not what was saved" in message and old in message and new in message
    assert "allow_edited=True (--allow-edited)" in message
    again = load(saved, allow_edited=True)
    assert " = aten.mm(x, w)" in print_program(again) and ("product" in print_program(again)) == name.endswith(".py")
    assert name.endswith(".py") or again.notes == ["factor head is not in this model"]


def test_an_edited_text_is_still_checked(saved: Path) -> None:
    text = (saved / "stages/main.py").read_text()
    (saved / "stages/main.py").write_text(text.replace("aten.mm(x, w)", "os.system(x)"))
    message = refused(saved, allow_edited=True)
    assert "stages/main.py, line " in message and "the operator os.system is not on the allow-list" in message
    assert 'mm_default: "f32[1, ffn 5/tp] partial(sum: dp) pad(zero: 1.0)" = os.system(x)' in message


def test_an_operator_off_the_list_is_refused_whatever_the_hashes(saved: Path) -> None:
    text = (saved / "stages/main.py").read_text().replace("aten.mm(x, w)", 'aten.from_file("/etc/passwd")')
    rehash(saved, "stages/main.py", text)
    assert "the operator aten.from_file is not on the allow-list" in refused(saved)


@pytest.mark.parametrize("name", ["stages/main.py", "program.json", "constants.safetensors", "weights.safetensors"])
def test_a_truncated_file_is_refused(saved: Path, name: str) -> None:
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: len(data) // 2])
    assert f"{saved / name} is not what was saved: it has {len(data) // 2} bytes" in refused(saved)
    if name.startswith(("stages", "program")):
        message = refused(saved, allow_edited=True)
        assert "this is no Python" in message or "is no JSON, it was truncated or edited" in message
    else:
        assert "save or copy the program again" in refused(saved, allow_edited=True)


def test_a_truncated_manifest_or_a_missing_file_is_refused(saved: Path) -> None:
    (saved / "stages/main.py").unlink()
    assert "is damaged: stages/main.py, which its manifest lists, is missing" in refused(saved, allow_edited=True)
    (saved / "manifest.json").write_text('{"format"')
    assert "manifest.json is no JSON, it was truncated or edited" in refused(saved)


@pytest.mark.parametrize("name", ["/etc/passwd", "../p.txt", "stages/../../p.txt", "stages//main.py", "..\\p.txt", "."])
def test_a_path_out_of_the_folder_is_refused(saved: Path, name: str) -> None:
    change_manifest(saved, files={name: {"bytes": 1, "sha256": "0"}})
    assert f"lists {name!r}, a path outside the program's folder: nothing was read" in refused(saved, allow_edited=True)


@pytest.mark.parametrize("name", ["stages/main.py", "stages"])
def test_a_link_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    shutil.move(saved / name, tmp_path / "elsewhere")
    (saved / name).symlink_to(tmp_path / "elsewhere")
    assert "is a link, which may lead out of the program's folder" in refused(saved)


def test_a_stage_that_the_manifest_does_not_list_is_refused(saved: Path) -> None:
    told = json.loads((saved / "program.json").read_text())
    rehash(saved, "program.json", json.dumps(told | {"stages": ["../../main"]}))
    assert "does not list stages/../../main.py" in refused(saved)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 2}, "is 'meshc program' version 2; this meshc reads 'meshc program' versions 3 to 6: compile and save the program"),
        ({"format": "other"}, "is 'other' version 6; this meshc reads"),
        ({"files": {}}, "manifest.json does not list program.json, which the program needs"),
        ({"files": []}, "manifest.json lists no files"),
        ({"files": {"program.json": 1}}, "manifest.json has no size and hash for program.json"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(saved: Path, changes: dict[str, Any], why: str) -> None:
    change_manifest(saved, **changes)
    assert why in refused(saved)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mesh": "dp=0"}, "does not describe a program: this mesh cannot be read"),
        ({"plan": "tp heads"}, "does not describe a program: "),
        ({"microbatches": "many"}, "the number of microbatches is 'many', and must be an integer"),
        ({"schedule": [{"op": "run", "stage": "other"}]}, "the schedule runs other, but the stages are main"),
        ({"schedule": [{"op": "run", "code": "x"}]}, "does not describe a program: TypeError"),
        ({"inputs": [{"kind": "secret", "name": "x", "type": "f32[]"}]}, "secret:x is no port: kinds are parameter, buffer"),
        ({"inputs": [{"kind": "input", "name": "x", "type": "int"}]}, "input:x is no port: "),
        ({"inputs": [{"kind": "input", "name": "x", "type": "(f32[])"}]}, "is a list of types where one value is meant"),
        ({"side_table": {"main": {"mm_default": {"source": {"path": "x"}}}}}, "entry for mm_default is no source, reason and phase"),
        ({"side_table": {"main": {"mm_default": {"again": "yes"}}}}, "entry for mm_default is no source, reason and phase"),
        ({"stages": ["main", "main"]}, "names the stage 'main' twice"),
        ({"side_table": []}, "does not describe a program: AttributeError"),
    ],
)
def test_a_program_that_makes_no_sense_is_refused(saved: Path, changes: dict[str, Any], why: str) -> None:
    told = json.loads((saved / "program.json").read_text())
    (saved / "program.json").write_text(json.dumps(told | changes))
    assert why in refused(saved, allow_edited=True)


def test_a_path_without_a_program(tmp_path: Path) -> None:
    assert f"there is no saved program at {tmp_path / 'none'}: `program.save(path)` makes such a folder" in refused(tmp_path / "none")
    assert "is no saved program: it has no manifest.json" in refused(tmp_path)


def test_saving_replaces_a_program_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    save(program("another reason"), saved)
    assert "another reason" in print_program(load(saved))
    assert os.listdir(tmp_path) == ["p.meshc"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")
    with pytest.raises(ArtifactError, match="exists and is no saved program: it is not replaced"):
        save(program(), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "all of it"


def test_a_failed_save_leaves_the_old_program(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = print_program(load(saved))
    unlisted = program()
    unlisted.stage.graph.call_function(torch.nn.functional.silu, ())
    with pytest.raises(ArtifactError, match="the operator torch.nn.functional.silu is not on the allow-list"):
        save(unlisted, saved)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "to_disk", full)
        with pytest.raises(FileError, match=r"(?s)p.meshc cannot be written: No space left .* MB are free.*make room there"):
            save(program("another reason"), saved)
    rename = Path.rename

    def fail_at_last(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise OSError("no such luck")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_exchange_names", lambda *_: False)
        patch.setattr(Path, "rename", fail_at_last)
        with pytest.raises(FileError, match="no such luck"):
            save(program("another reason"), saved)
    assert print_program(load(saved)) == text and len(load_weights(saved)) == 3
    assert os.listdir(tmp_path) == ["p.meshc"]


def test_a_save_that_was_killed_between_its_renames_names_the_old_program(saved: Path) -> None:
    saved.rename(saved.parent / ".p.meshc.old")
    assert f"what was there before a save that was cut short lies in {saved.parent / '.p.meshc.old'}: rename it" in refused(saved)
    assert load(saved.parent / ".p.meshc.old").mode == "forward"
    save(program(), saved)
    assert load(saved).mode == "forward" and os.listdir(saved.parent) == ["p.meshc"]
