"""Programs with features that golden programs lack: uneven tiles, recomputation, growth, chunks, rings, experts whose rows are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.export import Dim

import meshc
from tests import models
from tests.frontend.test_dynamic_dims import Rows
from tests.golden.cases import gpt, infer, train
from tests.passes.lower import test_dispatch_hops as hops
from tests.passes.lower import test_divide_updates as shares
from tests.zoo.run import case


class Words(nn.Module):
    """A head that may run in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def chunked(count: int) -> meshc.Program:
    model, ids = Words(), torch.zeros(8, 6, dtype=torch.int64)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=cross_entropy)
    return meshc.compile(step, meshc.Mesh("dp=2"), args=(ids,), kwargs={"target": ids}, plan=f"dp: batch\nchunk head: {count}")


def ring(attention: str) -> Callable[[], meshc.Program]:
    def make() -> meshc.Program:
        case = models.nanogpt(batch=2, seq=16, hidden=16, layers=1, heads=4, vocab=13)
        return train(case, "cp=2", "cp: seq", options=meshc.Options(sequence=meshc.SplitSequence(attention=attention)))

    return make


def dispatched(dispatch: str) -> meshc.Program:
    with hops.nodes_of(2):
        return hops.program("ep=4", dispatch)


def kept(**training: object) -> Callable[[], meshc.Program]:
    return lambda: train(gpt(), "dp_shard=2", clip=1.0, options=meshc.Options(training=meshc.Training(**training)))  # type: ignore[arg-type]


def in_turns() -> meshc.Program:
    options = meshc.Options(sequence=meshc.SplitSequence(recurrence="turns"))
    return train(case("mamba"), "cp=2", "cp: seq", sgd=True, options=options)


def left_open(model: nn.Module, mesh: str, plan: str | None, inputs: dict[str, torch.Tensor], loss: Any = None) -> meshc.Program:
    """A step whose rows and positions are open."""
    rows, length = Dim("rows", max=40), Dim("length", max=50)
    dims = {name: {0: rows, x.dim() - 1: length} if x.dim() > 1 else {0: rows} for name, x in inputs.items()}
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=inputs, plan=plan, options=meshc.Options(dynamic=dims))


def open_windows() -> meshc.Program:
    x, target = torch.randn(8, 3, 20), torch.zeros(8, dtype=torch.int64)
    return left_open(Rows(), "dp=2,cp=2", "dp: batch\ncp: length", {"x": x, "target": target}, loss=nn.functional.cross_entropy)


def open_step(mesh: str) -> Callable[[], meshc.Program]:
    def make() -> meshc.Program:
        case = models.llama(layers=1)
        return left_open(case.model, mesh, None, case.kwargs)

    return make


FEATURES: dict[str, Callable[[], meshc.Program]] = {
    "three ranks, uneven": lambda: train(gpt(), "tp=3", clip=1.0),
    "rows uneven": lambda: train(gpt(batch=5), "dp_shard=3", clip=1.0),
    "recomputed": lambda: train(gpt(layers=2), "dp_shard=2,tp=2", options=meshc.Options(remat="layer")),
    "all layers of many": lambda: train(gpt(layers=7), "dp=2,tp=2", clip=1.0),
    "chunks": lambda: chunked(2),
    "chunks, the last shorter": lambda: chunked(3),
    "ring": ring("ring"),
    "zigzag": ring("zigzag"),
    "gathered": ring("gather"),
    "convolutions split by height": lambda: train(models.resnet(), "cp=2", "cp: height"),
    "inference over three axes": lambda: infer(gpt(), "dp=2,cp=2,tp=2"),
    "experts whose rows are sent": lambda: dispatched("flat"),
    "experts whose rows are sent in two hops": lambda: dispatched("hierarchical"),
    "state in 16 bits, and gradients kept": kept(optimizer_state="bf16", keep_gradients=True),
    "state in 8 bits": kept(optimizer_state="8bit"),
    "updates of whole matrices divided": lambda: shares.compiled(shares.Orthogonal, "dp_shard=2", layers=2),
    "a recurrence in turns": in_turns,
    "open sizes and windows": open_windows,
    "open sizes": open_step("dp=2,tp=2"),
    "open sizes and a ring": open_step("cp=3"),
}
