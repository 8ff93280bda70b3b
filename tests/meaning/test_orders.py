"""Values that lie in the order of the rings that read them mean what they mean on one device, and are put in order once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.check import check_program
from meshc.cost.links import payload
from meshc.ir import calls, record, spmd
from meshc.program.program import PlainProgram
from tests.broad import broad
from tests.captured import Captured
from tests.meaning.test_rings import RING
from tests.models import FACTORIES
from tests.zoo.run import adamw, case

SEQ = 36
"""Divided by two, three and four ranks; of twelve ranks each has three positions: halves of two and of one."""


@cache
def captured(kind: str, layers: int) -> Captured:
    return Captured(FACTORIES[kind](seq=SEQ, batch=4, layers=layers), train=True, double=True)


def exchanged(program: PlainProgram) -> list[torch.dtype | None]:
    """What is exchanged between mirrored ranks, by its kind of number."""
    nodes = [node for stage in program.stages.values() for node in calls(stage.graph)]
    return [record(node).dtype for node in nodes if node.target in spmd.OF_ORDER]


CASES: list[Any] = [
    broad("llama", "cp=2", RING, {}),
    ("nanogpt", "cp=3", RING, {}),
    broad("llama", "cp=4", RING, {}),
    broad("llama", "cp=12", RING, {}),
    broad("llama", "dp=2,cp=2", "dp: batch\ncp: seq", {}),
    broad("llama", "cp=2,tp=2", "cp: seq\ntp: heads, ffn, vocab", {}),
    broad("llama", "dp_shard=2,cp=2", "dp_shard: batch; store params, grads, state\ncp: seq", {}),
    broad("nanogpt", "cp=2,hp=2", "cp: seq\nhp: heads@attention > seq", {}),
    broad("llama", "cp=2", RING, {"remat": "layer"}),
    broad("llama", "cp=2", RING, {"microbatches": 2}),
    broad("llama", "pp=2,cp=2", RING, {"microbatches": 2}),
    broad("nanogpt", "pp=2,cp=2", RING, {"microbatches": 2, "schedule": "zb_h1", "remat": "selective"}),
]


@pytest.mark.parametrize("kind, mesh, plan, how", CASES)
def test_a_training_step_is_the_models_own(kind: str, mesh: str, plan: str, how: dict[str, Any]) -> None:
    """Loss, every gradient, and parameters after two steps. Of a decoder only ids, positions and labels are exchanged."""
    source = captured(kind, 2 if "pp" in mesh else 1)
    source.verify_training(mesh, plan, adamw, attention="zigzag", **how)
    assert source.latest is not None and set(exchanged(source.latest)) == {torch.int64}


class Layers(nn.Module):
    """Two layers of attention, with what `between` does to [rows, positions, width] before the second; all positions are given."""

    def __init__(self, between: nn.Module, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.between, self.heads = between, heads

    def forward(self, x: Tensor) -> Tensor:
        for index, qkv in enumerate(self.qkv):
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = self.between(x) if index == 0 else x
        return x


class Neighbours(nn.Module):
    """Reads each position's neighbour before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class Prefix(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / 8


class Features(nn.Module):
    """Running sums of each position by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(2) / 8


class Mean(nn.Module):
    """Reads all positions, in whatever order."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Places(nn.Module):
    """Reads where each position stands."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1], device=x.device)[:, None].cos()


class Picks(nn.Module):
    """Reads other positions, by their numbers, and scores of all of them."""

    def forward(self, x: Tensor) -> Tensor:
        others = (7 * torch.arange(x.shape[1], device=x.device) + 3) % x.shape[1]
        scores = F.log_softmax(x[..., 0], 1)
        return x + x[:, others] + scores.gather(1, others.expand(x.shape[0], -1))[..., None]


class Largest(nn.Module):
    """The two largest features of each position, as a router takes its scores: their gradient begins with zeros of all."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.topk(2, -1).values.sum(-1, keepdim=True)


class Windows(nn.Module):
    """Looks at the positions as windows of some, of which each rank has whole ones."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(1, (self.count, -1))
        return (y - y.mean(2, keepdim=True)).flatten(1, 2)


class Turned(nn.Module):
    """Looks at the same positions under another shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[2]).tanh().t().contiguous().t().reshape(x.shape)


def trained(model: nn.Module, mesh: str, plan: str, length: int = 12) -> meshc.Program:
    """In float64, as it is verified: both are of one trace."""
    torch.manual_seed(0)
    step = meshc.TrainStep(model.double(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().sin().mean())
    x = torch.randn(2, length, 16, dtype=torch.float64)
    return meshc.compile(
        step, meshc.Mesh(mesh), args=(x,), plan=plan, options=meshc.Options(sequence=meshc.SplitSequence(attention="zigzag"))
    )


BETWEEN: list[Any] = [
    broad(nn.Identity(), "cp=2", 1),
    broad(Mean(), "cp=2", 1),
    broad(Turned(), "cp=2", 1),
    broad(Largest(), "cp=2", 1),
    broad(Windows(4), "cp=2", 1),
    broad(Features(), "cp=2", 1),
    broad(Windows(6), "cp=2", 18),
    broad(nn.LayerNorm(16), "cp=3", 1),
    (Places(), "cp=2", 2),
    broad(Neighbours(), "cp=2", None),
    broad(Neighbours(), "cp=3", None),
    (Prefix(), "cp=2", None),
    broad(Picks(), "cp=2", 8),
    broad(nn.Dropout(0.3), "cp=2", 4),
    broad(nn.GRU(16, 16, batch_first=True), "cp=2", None),
]


@pytest.mark.parametrize("between, mesh, count", BETWEEN, ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None)
def test_what_reads_positions_neighbours_or_a_prefix_has_them_in_their_own_order(between: nn.Module, mesh: str, count: int | None) -> None:
    """What treats each position by itself costs no exchange: what the model is given is exchanged, once. What does not costs two in
    forward and two in backward, around it; of dropout the mask is exchanged in place of two of these. Three windows of a rank have no
    halves, so that each attention exchanges its own operands."""
    if isinstance(between, nn.GRU):
        between = First(between)
    program = trained(Layers(between), mesh, RING)
    assert meshc.verify(program, dtype=torch.float64).ok
    assert isinstance(program.compiled, PlainProgram)
    assert len(exchanged(program.compiled)) == (5 if count is None else count)


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return found


def test_what_a_model_gives_is_in_its_own_order() -> None:
    """Outputs and gradients of inputs, in module mode."""
    torch.manual_seed(0)
    model, x = Layers(nn.Identity()).double(), torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    program = meshc.compile(
        model, meshc.Mesh("cp=3"), args=(x,), plan=RING, options=meshc.Options(sequence=meshc.SplitSequence(attention="zigzag"))
    )
    report = meshc.verify(program, dtype=torch.float64)
    assert report.worst < 1e-10 and len(report.rows) > 4


@pytest.mark.broad
@pytest.mark.parametrize("length, whole", [(13, False), broad(12, True)])
def test_tiles_that_are_padded_are_exchanged_at_each_ring(length: int, whole: bool) -> None:
    program = trained(Layers(nn.Identity()), "cp=4", RING, length)
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10
    assert isinstance(program.compiled, PlainProgram)
    assert (len(exchanged(program.compiled)) == 1) == whole


@pytest.mark.broad
@pytest.mark.parametrize("kind, mesh, plan", [
    ("mixtral", "cp=2,ep=2", "cp: seq\nep: experts > batch"),
    ("qwen3_moe", "dp=2,cp=2", "dp: experts@*.mlp.experts > batch\ncp: seq"),
])  # fmt: skip
def test_routed_rows_stay_in_the_order_of_the_ring(kind: str, mesh: str, plan: str) -> None:
    """A router and its experts treat each row by itself, and the zeros that torch's gradient of the largest scores begins with are made as
    they are read. So ids, positions and labels are exchanged, halves of them, and nothing in backward."""
    asked = case(kind)
    step = meshc.TrainStep(asked.model, optimizer=torch.optim.SGD(asked.model.parameters(), lr=0.1), loss=asked.loss)
    program = meshc.compile(
        step, meshc.Mesh(mesh), kwargs=asked.call_kwargs, plan=plan, options=meshc.Options(sequence=meshc.SplitSequence(attention="zigzag"))
    )
    assert meshc.verify(program, dtype=torch.float64).ok
    assert isinstance(program.compiled, PlainProgram)
    check_program(program.compiled, "the program")
    moved = [node for stage in program.compiled.stages.values() for node in calls(stage.graph) if node.target in spmd.OF_ORDER]
    assert {(record(node).dtype, record(node).phase) for node in moved} == {(torch.int64, "forward")}
    rows, length = asked.call_kwargs["input_ids"].shape
    half = length // 4
    assert sum(payload(node, {}) for node in moved) == 8 * (rows // 2 * half + half + rows // 2 * half)
