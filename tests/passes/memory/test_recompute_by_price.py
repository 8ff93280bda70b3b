"""What backward recomputes where nobody says anything: what is worth its seconds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from meshc.cost import peak_memory
from meshc.ir import calls, op_name, records, spmd
from meshc.ir.regions import region_of


class Deep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def step_of(rows: int, width: int, plan: str, remat: str | None = None, backend: str = "eager") -> meshc.Program:
    model = Deep(width)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    x = torch.zeros(rows, width)
    mesh, options = meshc.Mesh("tp=2" if plan == "megatron" else "dp=2"), meshc.Options(remat=remat)
    return meshc.compile(step, mesh, plan=plan, args=(x,), kwargs={"target": x}, options=options, backend=backend)


def recomputed(program: meshc.Program) -> list[str]:
    """Beside layouts of parameters."""
    (stage,) = program.compiled.stages.values()
    return [name for node in calls(stage.graph) if records(node)[0].again and (name := op_name(node)) != "aten.t"]


def held(program: meshc.Program) -> int:
    return peak_memory.peak_rank(program.compiled).total


def test_much_memory_for_few_seconds_is_recomputed() -> None:
    """What looks at a value that is kept is read as it is; `cheap` recomputes that too."""
    program = step_of(2048, 512, "ddp")
    assert recomputed(program) == ["aten.gelu"] * 4
    assert recomputed(step_of(2048, 512, "ddp", "cheap")) == ["shard", *["aten.gelu"] * 4, "shard"]
    assert held(program) < 0.85 * held(step_of(2048, 512, "ddp", "none"))


@pytest.mark.parametrize("rows, width", [(8, 8), (8, 256)])
def test_little_memory_and_what_takes_long_is_kept(rows: int, width: int) -> None:
    """Of a small batch launches are what takes time; of wide layers parameters are what takes memory."""
    assert recomputed(step_of(rows, width, "ddp")) == []
    assert "aten.gelu" in recomputed(step_of(rows, width, "ddp", "cheap"))


def test_what_is_recomputed_stands_in_the_region_that_reads_it() -> None:
    """It could run in forward's, as what it is made of is there, and would be there from then on."""
    program = step_of(2048, 512, "megatron", backend="inductor")
    assert recomputed(program) == ["aten.gelu"] * 4
    (stage,) = program.compiled.stages.values()
    gelus = [node for node in calls(stage.graph) if op_name(node) == "aten.gelu"]
    first = {region_of(node) for node in gelus if not records(node)[0].again}
    again = [node for node in gelus if records(node)[0].again]
    assert all(region_of(node) == region_of(min(node.users)) for node in again)
    assert len({region_of(node) for node in again}) == 4 and not first & {region_of(node) for node in again}
    # on two gloo ranks 0.83 of what is held without
    assert held(program) < 0.85 * held(step_of(2048, 512, "megatron", "none", "inductor"))


def test_lines_of_a_plan_say_otherwise() -> None:
    plan = "dp: batch\nremat layers.1: none"
    assert recomputed(step_of(2048, 512, plan)) == ["aten.gelu"] * 3


@pytest.mark.broad
def test_an_exchange_is_recomputed_for_its_bytes() -> None:
    """Of a long sequence, where attention's output would be kept by heads and by positions (docs/decisions/recompute.md)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
        max_position_embeddings=8192,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config), torch.randint(0, 64, (1, 4096))
    inputs = {"input_ids": ids, "labels": ids}
    step, held = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)), {}
    for remat in ("none", None):
        asked = meshc.Options(remat=remat)
        program = meshc.compile(step, meshc.Mesh("cp=4"), kwargs=inputs, plan="cp: heads@attention > seq", options=asked)
        held[remat] = peak_memory.peak_rank(program.compiled).total
    exchanged = [node for stage in program.compiled.stages.values() for node in calls(stage.graph) if node.target is spmd.all_to_all]
    assert sum(records(node)[0].again for node in exchanged) == 1
    assert held[None] < held["none"]
    assert meshc.verify(program, dtype=torch.float64).ok
