"""Attention that a model writes out becomes one call; what looks like it, and is not, stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshc
from tests.broad import broad
from tests.passes.stepped import around, changed


class Writes(nn.Module):
    """The way of many models, and ways that differ from it by one thing."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how, self.qkv, self.bias = how, nn.Linear(6, 18), nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (2, 3)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        how = self.how
        scores = q @ k.transpose(-2, -1)
        scores = scores / math.sqrt(3) if how.get("divides") else scores * 0.5
        if how.get("adds"):
            scores += self.bias
        hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, how.get("hides", -math.inf))
        if how.get("fewer"):
            scores = scores.to(torch.bfloat16)
        weights = F.softmax(scores, dim=how.get("dim", -1), dtype=how.get("dtype")).to(x.dtype)
        weights = F.dropout(weights, how.get("drops", 0.0))
        if how.get("twice"):
            weights = weights * 2
        mixed = weights @ (v[:, :, :, :2] if how.get("differs") else v)
        return (mixed, weights) if how.get("shows") else mixed


def raised(model: nn.Module) -> str:
    with torch.no_grad():
        return changed(*around("raise", model, "dp=2", x=torch.zeros(4, 8, 6)))


KINDS: list[dict[str, Any]] = [
    {}, {"divides": True}, {"adds": True}, {"drops": 0.25}, {"dtype": torch.float32}, {"hides": torch.finfo(torch.float32).min},
]  # fmt: skip


@pytest.mark.parametrize("how", [KINDS[0], KINDS[-1], *map(broad, KINDS[1:-1])], ids=str)
def test_the_whole_becomes_one_call(how: dict[str, Any]) -> None:
    text = raised(Writes(**how))
    assert "meshc.ops.sdpa.written_out_attention(" in text
    gone = [line for line in text.splitlines() if line.startswith("-")]
    assert all(any(word in line for line in gone) for word in ("matmul", "softmax", "masked_fill"))


OTHERS = [{"dim": 2}, {"twice": True}, {"shows": True}, {"hides": -10.0}, {"fewer": True}, {"dtype": torch.bfloat16}]


@pytest.mark.parametrize("how", [*OTHERS[:2], *map(broad, OTHERS[2:])], ids=str)
def test_what_is_something_else_stays(how: dict[str, Any]) -> None:
    """Weights along another dim, doubled, returned, or in fewer bits; a number that does not hide."""
    assert "sdpa.weighed" not in raised(Writes(**how))


def test_weights_in_fewer_bits_than_queries_stay() -> None:
    model = Writes(dtype=torch.float32).double()
    assert "sdpa.weighed" not in changed(*around("raise", model, "dp=2", x=torch.zeros(4, 8, 6).double()))


@pytest.mark.parametrize("how", [{"adds": True, "drops": 0.25, "divides": True}, {"differs": True, "drops": 0.25}], ids=str)
def test_it_means_what_it_meant(how: dict[str, Any]) -> None:
    """As a ring; where values are of another size, as it was written."""
    torch.manual_seed(0)
    model = Writes(**how).double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    options = meshc.Options(sequence=meshc.SplitSequence(attention=None if "differs" in how else "ring"))
    inputs = {"x": torch.randn(2, 8, 6, dtype=torch.float64)}
    program = meshc.compile(step, meshc.Mesh("cp=3"), kwargs=inputs, plan="cp: seq", options=options)
    assert any("ring_shift" in str(node.target) for node in program.compiled.stages["main"].graph.nodes) == ("differs" not in how)
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10


def test_under_a_causal_mask_it_is_causal() -> None:
    """A mask of positions becomes an attribute, as that of any attention."""
    program = meshc.compile(Writes(drops=0.25), meshc.Mesh("dp=2"), kwargs={"x": torch.zeros(4, 8, 6)})
    nodes = [node for stage in program.compiled.stages.values() for node in stage.graph.nodes]
    calls = [node for node in nodes if "meshc.attention" in str(node.target)]
    assert len(calls) == 2
    for call in calls:
        names = (argument.name for argument in call.target._schema.arguments)
        given = dict(zip(names, call.args, strict=False))  # what stands last may be left out
        assert given["bias"] is None and given["causal"] is True


class WritesSinks(nn.Module):
    """gpt-oss's way, and ways that differ from it by one thing."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.sinks, self.how = nn.Parameter(torch.zeros(2)), how

    def forward(self, x: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scores = torch.matmul(x, x.transpose(2, 3)) * 0.5 + mask
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[2], -1)
        combined = torch.cat([sinks, scores] if self.how.get("first") else [scores, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        weights = F.softmax(combined, dim=2 if self.how.get("other") else -1, dtype=combined.dtype)
        weights = weights[..., 1:] if self.how.get("first") else weights[..., :-1]
        weights = F.dropout(weights, p=float(bool(self.how.get("drops"))) / 4)
        if self.how.get("twice"):
            weights = weights * 2
        mixed = torch.matmul(weights, x)
        return (mixed, weights) if self.how.get("shows") else mixed


def raised_with_sinks(model: nn.Module) -> str:
    inputs = {"x": torch.zeros(4, 2, 8, 3), "mask": torch.zeros(4, 1, 8, 8)}
    with torch.no_grad():
        return changed(*around("raise", model, "dp=2", **inputs))


def test_sinks_and_all_become_one_call() -> None:
    text = raised_with_sinks(WritesSinks())
    _turned, made, _returned = [line for line in text.splitlines() if line.startswith("+")]
    assert "meshc.ops.sdpa.written_out_attention(" in made and made.endswith("0.5, torch.float32, sinks)")
    gone = [line for line in text.splitlines() if line.startswith("-")]
    assert all(any(word in line for line in gone) for word in ("matmul", "softmax", "torch.cat", ".max("))


@pytest.mark.parametrize("how", ["first", "shows", *map(broad, ("other", "drops", "twice"))])
def test_what_looks_like_sinks_stays(how: str) -> None:
    """A sink before the scores; weights along another dim, dropped, doubled, or returned."""
    assert "written_out_attention" not in raised_with_sinks(WritesSinks(**{how: True}))
