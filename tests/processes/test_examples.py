"""The scripts of `examples/` on two ranks: losses fall, equal those of the same script on one device, and so does what is saved.

`train_llama.py` is `make demo`; `train_lm.py` and `generate.py` have tests of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.launch import Run, launch

pytestmark = pytest.mark.processes

TEXT = ("--steps", "6", "--batch", "4", "--seq", "16")


def losses(name: str, out: Path, *arguments: str) -> Run:
    """Runs the example, and compares the losses: they are float32 in the models themselves, and so is all of the one with experts."""
    ended = launch("tests.processes.examples:run", name, str(out), *arguments, ranks=2, timeout_s=240)
    assert ended.ok, ended
    found, wanted = json.loads(ended.ranks[0].out.splitlines()[-1])
    assert found == pytest.approx(wanted, rel=1e-5 if name != "train_moe" else 1e-4) and found[-1] < found[0], (found, wanted)
    return ended


def same_files(out: Path, name: str) -> None:
    """What was saved from the mesh has the names and values of what plain PyTorch has saved."""
    found, wanted = (load_file(out / folder / name) for folder in ("mesh", "plain"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)  # Adam makes much of the last digits of a small gradient


@pytest.mark.broad
def test_a_vision_model_on_a_folder_of_images(tmp_path: Path) -> None:
    ended = losses("finetune_images", tmp_path, "--epochs", "2")
    assert sorted(path.name for path in (tmp_path / "toy-images").iterdir()) == ["grass", "sand", "water"]
    assert ended.ranks[0].out.count("held-out images right") == 4
    same_files(tmp_path, "model.safetensors")


@pytest.mark.broad
def test_lora_of_a_causal_model(tmp_path: Path) -> None:
    ended = losses("finetune_lora", tmp_path, *TEXT, "--width", "32", "--rank", "2")
    assert "lies here as" in ended.ranks[0].out
    same_files(tmp_path, "adapter_model.safetensors")


def test_experts_on_different_ranks(tmp_path: Path) -> None:
    ended = losses("train_moe", tmp_path, *TEXT, "--width", "16")
    assert "of 4 experts in a layer, 2 lie here" in ended.ranks[0].out


@pytest.mark.broad
def test_a_pipeline(tmp_path: Path) -> None:
    ended = losses("train_pipeline", tmp_path, *TEXT, "--width", "16", "--layers", "2", "--microbatches", "2")
    assert "pipeline over pp" in ended.ranks[0].out
