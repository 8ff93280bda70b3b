"""Keys that stay on their ranks, for queries that are few: what ranks give is joined, and means what attention means on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.report import summary
from tests.broad import broad
from tests.frontend.test_padded_caches import a_token, llama
from tests.meaning.test_rings import verified


@pytest.mark.parametrize("mesh", ["cp=2", broad("cp=3"), broad("cp=2,tp=2"), broad("dp=2,cp=2")])
def test_a_token_looks_at_keys_where_they_lie(mesh: str) -> None:
    """A cache lies by its tokens, nobody gathers it, and what each rank makes of its own part is sent: an output and a sum of
    exponentials for each query and head."""
    plan = "\n".join({"cp": "cp: seq", "tp": "tp: heads, ffn", "dp": "dp: batch"}[axis.split("=")[0]] for axis in mesh.split(","))
    program = meshc.compile(llama(), meshc.Mesh(mesh), kwargs=a_token(5), plan=plan)
    ports = [*program.compiled.inputs, *program.compiled.outputs]
    assert all("seq 16/cp" in str(port.sharding) for port in ports if port.name.startswith("cache."))
    assert str(program).count("= meshc.attention_join(") == 2
    assert meshc.verify(program).worst < 1e-5


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_do_not_grow_with_the_keys(ranks: int) -> None:
    """`rows * heads * queries * (head + 1)` numbers of each other rank, in each layer."""
    program = meshc.compile(llama(), meshc.Mesh(f"cp={ranks}"), kwargs=a_token(5), plan="cp: seq")
    layers, rows, heads, head = 2, 4, 4, 8
    moved = sum(use.bytes_per_rank * use.times for use in summary.collectives(program.compiled) if use.kind == "all_gather")
    assert moved == layers * ranks * rows * heads * (head + 1) * 4, "an all-gather counts as its result"


class Crosses(nn.Module):
    """A few queries of their own, which look at all of a sequence."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.asked, self.kv, self.how = nn.Parameter(torch.randn(1, 2, 3, 8)), nn.Linear(16, 32), how

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        return F.scaled_dot_product_attention(self.asked.expand(len(x), -1, -1, -1), k, v, attn_mask=bias)


@pytest.mark.parametrize("mesh", ["cp=3", broad("cp=4")])
@pytest.mark.parametrize("bias", [None, torch.randn(2, 1, 3, 7).masked_fill(torch.rand(2, 1, 3, 7) < 0.5, -torch.inf)])
def test_a_training_step_is_the_models_own(mesh: str, bias: Tensor | None) -> None:
    """7 positions in tiles of 3 and of 2; gradients of keys and values are made where these lie."""
    inputs = {"x": torch.randn(2, 7, 16)} | ({} if bias is None else {"bias": bias})
    assert "meshc.attention_join(" in str(verified(Crosses(), mesh, inputs, None))
