"""`examples/train_lm.py`: what is killed and goes on has the losses of what never stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.broad import broad
from tests.runtime.launch import launch

pytestmark = pytest.mark.processes


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def text(folder: Path) -> str:
    (folder / "text.txt").write_text("".join(f"Line {line} of {line * 7 % 31}: a mesh of {line % 5} axes.\n" for line in range(200)))
    return str(folder / "text.txt")


def start(function: str, *arguments: str) -> bool:
    ended = launch(f"tests.processes.train_lm:{function}", *arguments, ranks=2, timeout_s=240)
    assert not ended.timed_out and (ended.ok or function == "killed"), ended
    return ended.ok


def refused(*arguments: str) -> str:
    """What rank 0 says last of a start that ends at once, without pages of torch's."""
    ended = launch("tests.processes.train_lm:run", "--sample-every", "0", "--mesh", "dp=2", *arguments, ranks=2, timeout_s=240)
    said = ended.ranks[0].err
    assert not ended.timed_out and ended.ranks[0].code == 1 and "Traceback" not in said, ended
    return said


@pytest.mark.parametrize("first, second", [("dp=2", "dp=2"), broad("dp=2", "tp=2"), broad("dp_shard=2", "dp=2")])
def test_a_job_that_is_killed_goes_on_as_if_it_had_not_been(first: str, second: str, tmp_path: Path) -> None:
    given, out = text(tmp_path), tmp_path / "out"
    assert not start("killed", "5", "--sample-every", "0", "--text", given, "--out", str(out), "--mesh", first)
    before = rows(out)
    assert [row["step"] for row in before] == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in out.glob("step-*0[0-9]")) == ["step-00000002"], "what it goes on from: steps 2 to 5 are run again"
    start("run", "--sample-every", "0", "--text", given, "--out", str(out), "--mesh", second)
    again = rows(out)
    assert [row["step"] for row in again] == list(range(7)) and "valid_loss" in again[3]
    assert all(again[step]["tokens_per_s"] != before[step]["tokens_per_s"] for step in (2, 3, 4, 5))
    difference = 0.0 if first == second else 2e-2  # in bfloat16, with sums in another order
    for ours, theirs in zip(again, before, strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=difference, rel=0) and ours["lr"] == theirs["lr"]
    assert again[6]["loss"] < again[0]["loss"]
    assert sorted(path.name for path in out.glob("step-*")) == ["step-00000004", "step-00000006"]


@pytest.mark.broad
def test_what_a_folder_cannot_go_on_from_is_said(tmp_path: Path) -> None:
    given, out = text(tmp_path), tmp_path / "out"
    start("run", "--sample-every", "0", "--text", given, "--out", str(out), "--mesh", "dp=2")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "sample": "a row that was cut off}')
    (out / "step-00000008.tmp").write_text("no folder")
    said = refused("--text", given, "--out", str(out), "--steps", "10")
    assert "step-00000008.tmp cannot be written: on rank 0 FileExistsError" in said and "the job goes on from" in said
    assert [row["step"] for row in rows(out)] == [*range(10)], "steps behind the newest checkpoint were run again, in whole rows"
    for file in (out / "step-00000006").glob("*.distcp"):
        os.truncate(file, 1000)
    said = refused("--text", given, "--out", str(out))
    assert "step-00000006 cannot be read: on rank 0 " in said and "goes on from" in said and "step-00000004" in said
    said = refused("--text", given, "--out", str(out), "--layers", "2", "--batch", "6")
    assert "was begun with --layers 1, and now 2; --batch 4, and now 6" in said


@pytest.mark.broad
def test_it_writes_text_on_its_way(tmp_path: Path) -> None:
    start("run", "--sample-every", "4", "--text", text(tmp_path), "--out", str(tmp_path / "out"), "--mesh", "tp=2")
    (written,) = [row["sample"] for row in rows(tmp_path / "out") if "sample" in row]
    assert str(written).startswith("The ") and len(str(written)) > 4
