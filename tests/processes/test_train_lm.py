"""`examples/train_lm.py`: what is killed and goes on has the losses of what never stopped."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("first, second", [("dp=2", "dp=2"), broad("dp=2", "tp=2"), broad("dp_shard=2", "dp=2")])
def test_a_job_that_is_killed_goes_on_as_if_it_had_not_been(first: str, second: str, tmp_path: Path) -> None:
    given, out = text(tmp_path), tmp_path / "out"
    assert not start("killed", "5", "--sample-every", "0", "--text", given, "--out", str(out), "--mesh", first)
    before = rows(out)
    assert [row["step"] for row in before] == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in out.glob("step-*0[0-9]")) == ["step-00000002"], "what it goes on from: steps 2 to 5 are made again"
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
def test_it_writes_text_on_its_way(tmp_path: Path) -> None:
    start("run", "--sample-every", "4", "--text", text(tmp_path), "--out", str(tmp_path / "out"), "--mesh", "tp=2")
    (written,) = [row["sample"] for row in rows(tmp_path / "out") if "sample" in row]
    assert str(written).startswith("The ") and len(str(written)) > 4
