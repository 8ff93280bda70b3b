"""What of attention along a split sequence is not balanced or not skipped, and what that costs, by formulas worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshc import artifact
from meshc.cost.devices import assume_device, device
from meshc.program.program import PlainProgram
from tests.formulas.uneven_attention import uneven_attention
from tests.meaning.test_rings import Attends, Near, trained

H100 = device("h100")
PAGE = Path(__file__).parents[2] / "docs/long-context.md"
LENGTH, HIDDEN = 4096, 256


def compiled(model: nn.Module, mesh: str, attention: str | None, length: int = LENGTH, **inputs: Tensor) -> PlainProgram:
    with assume_device(H100):
        x = torch.empty(1, length, model.qkv.in_features)  # type: ignore[union-attr, arg-type]
        return trained(model, mesh, {"x": x, **inputs}, attention).compiled


def of_the_mean(ranks: int, length: int) -> float:
    """Of a causal mask in natural order: the last rank's tiles, all but its own whole."""
    tile = length / ranks
    own = (tile + H100.attention_keys) / 2
    return ((ranks - 1) * tile + own) / ((ranks - 1) / 2 * tile + own)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_last_rank_looks_at_all_gathered_keys(ranks: int) -> None:
    """Forward and backward are 4 and 10 multiplications and additions for each score and number of a head; the last rank has half of
    (n - 1) tiles of keys more than the mean."""
    (found,) = uneven_attention(compiled(Attends(HIDDEN, 2, is_causal=True), f"cp={ranks}", "gather"), H100)
    tile = LENGTH // ranks
    assert found.most == pytest.approx(of_the_mean(ranks, LENGTH), rel=1e-12)
    assert found.most == pytest.approx((2 * ranks - 1) / ranks, rel=0.1)
    more = 14 * HIDDEN * tile * (ranks - 1) * tile / 2
    assert found.costs_s == pytest.approx(more / H100.rate(torch.float32, attention=True), rel=1e-9)
    assert found.axes == ("cp",) and found.gathered == 2 * LENGTH * HIDDEN * 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_step_of_a_ring_in_natural_order_is_as_long_as_the_last_ranks(ranks: int) -> None:
    """Dropped weights keep it in that order."""
    (found,) = uneven_attention(compiled(Attends(16, is_causal=True, dropout_p=0.1), f"cp={ranks}", "ring", 2048), H100)
    assert found.most == pytest.approx(of_the_mean(ranks, 2048), rel=1e-12) and not found.gathered


def test_blocks_of_a_window_are_computed_whole() -> None:
    """Of 4: 1,024 queries see 4 keys each, but for the first three of all; kernels take blocks of 128 with 131 keys, the first with 128."""
    (found,) = uneven_attention(compiled(Windowed(), "cp=2", "gather", 2048), H100)
    seen = (2 * 1024 * 4 - 6) / 2
    assert found.most == pytest.approx(1024 * 131 / seen, rel=1e-12)


class Windowed(Near):
    def __init__(self) -> None:
        super().__init__(True)
        self.qkv = self.attention.qkv


BALANCED: list[tuple[dict[str, Any], str, str]] = [
    ({"is_causal": True}, "cp=4", "zigzag"), ({}, "cp=4", "ring"), ({}, "cp=2", "gather"),
]  # fmt: skip


@pytest.mark.parametrize("how, mesh, attention", BALANCED, ids=str)
def test_what_is_balanced_is_not_listed(how: dict[str, Any], mesh: str, attention: str) -> None:
    program = compiled(Attends(16, **how), mesh, attention, 64)
    assert not uneven_attention(program, H100)


@pytest.mark.parametrize("attention", ["ring", "gather"])
def test_of_a_mask_that_is_a_tensor_the_cost_is_at_most_all(attention: str) -> None:
    bias = torch.zeros(1, 1, 64, 64)
    program = compiled(Attends(16), "cp=2", attention, 64, bias=bias)
    (found,) = uneven_attention(program, H100)
    assert not found.most and found.why.endswith("what that hides is computed") and 0 < found.costs_s < found.takes_s
    (found,) = uneven_attention(program, device("cpu"))
    assert not found.most and found.why.endswith("known when it is there") and 0 < found.costs_s < found.takes_s


class Learned(Attends):
    """A bias by position, which hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.by_position = nn.Embedding(128, 1)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        at = torch.arange(x.shape[1])
        apart = (at - at[:, None]).clamp(-64, 63) + 64
        return super().forward(x, self.by_position(apart).permute(2, 0, 1).unsqueeze(0))


def test_a_bias_that_hides_nothing_is_not_listed() -> None:
    assert not uneven_attention(compiled(Learned(), "cp=2", "ring", 64), H100)


def test_a_loaded_program_says_it_too(tmp_path: Path) -> None:
    program = compiled(Attends(16, is_causal=True), "cp=2", "gather", 64)
    artifact.save(program, tmp_path / "gathered.meshc")
    loaded = artifact.load(tmp_path / "gathered.meshc")
    assert uneven_attention(loaded, H100) == uneven_attention(program, H100) != []
