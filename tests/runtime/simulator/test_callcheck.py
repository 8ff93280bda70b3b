"""What passes do to the graph of torch's calls is compared by its meaning: right ones pass, one that changes a number is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshc
from meshc.errors import VerifyError
from meshc.passes import pipeline
from meshc.passes.phases.traced_model import TracedModel


class Mixed(nn.Module):
    """Casts, a checkpointed region, draws, attention, a buffer that is written, an index."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = checkpoint(self._region, self.table(ids), use_reentrant=False)
            hidden = F.layer_norm(F.dropout(self.last(hidden), 0.3), (8,))
        hidden = self.norm(hidden.float().transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(hidden.flatten(0, 1), ids.flatten()) + torch.rand_like(hidden).sum()

    def _region(self, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.gelu(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2) @ self.last.weight)


def compiled() -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD((model := Mixed()).parameters(), lr=0.1)
    meshc.compile(meshc.TrainStep(model, optimizer=optimizer), meshc.Mesh("dp=2"), kwargs={"ids": torch.zeros(4, 5, dtype=torch.int64)})


Change = Callable[[TracedModel], None]


def swap(target: object, other: object) -> Change:
    def change(traced: TracedModel) -> None:
        for node in traced.model.module.graph.nodes:
            if node.target in (target, other):
                node.target = other
        traced.model.module.recompile()

    return change


def without(matches: Callable[[Node], bool]) -> Change:
    """The first call that matches hands on its operand."""

    def change(traced: TracedModel) -> None:
        graph = traced.model.module.graph
        node = next(node for node in graph.nodes if matches(node))
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        traced.model.module.recompile()

    return change


def breaking(monkeypatch: pytest.MonkeyPatch, name: str, change: Change) -> None:
    """The pass of this name makes a mistake too."""

    def broken(one: pipeline.Pass[TracedModel, TracedModel]) -> pipeline.Pass[TracedModel, TracedModel]:
        def run(traced: TracedModel) -> TracedModel:
            left = one.run(traced)
            change(left)
            return left

        return replace(one, run=run) if one.name == name else one

    monkeypatch.setattr(pipeline, "TRACE", tuple(map(broken, pipeline.TRACE)))


def test_what_passes_do_means_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_VERIFY", "1")
    compiled()


def is_cast(node: Node) -> bool:
    return node.op == "call_method" and node.target == "to" and torch.bfloat16 in node.args


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("autocast", swap(F.layer_norm, F.rms_norm), "is off by"),
        ("autocast", without(is_cast), "off by|dtype"),
        ("inline", swap(F.gelu, F.relu), "is off by"),
        ("raise", swap(F.gelu, F.silu), "is off by"),
        ("raise", without(lambda node: "dropout" in str(node.target)), "is off by"),
    ],
)
def test_a_mistake_is_named_by_its_pass(monkeypatch: pytest.MonkeyPatch, name: str, change: Change, said: str) -> None:
    monkeypatch.setenv("MESHC_VERIFY", "1")
    breaking(monkeypatch, name, change)
    with pytest.raises(VerifyError, match=f"after the pass {name} (?s:.*)({said})"):
        compiled()
