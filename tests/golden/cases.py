"""What is compiled: each model kind with a plan, microbatches or stages, and something to do: train, infer, take part in autograd.

The models are the project's own, so that no release of another library changes a text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

import meshc
from tests import models
from tests.models import Case


def train(case: Case, mesh: str, plan: str | None = None, *, clip: float | None = None, sgd: bool = False, **ask: Any) -> meshc.Program:
    """A training step; `ask` has fields of the TrainStep (microbatches, batch_mix) and arguments of compile (inputs, options)."""
    parameters = case.model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if sgd else torch.optim.AdamW(parameters, lr=1e-3)
    own = {name: ask.pop(name) for name in ("microbatches", "batch_mix") if name in ask}
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=clip, **own)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, **ask)


def infer(case: Case, mesh: str, plan: str | None = None, **ask: Any) -> meshc.Program:
    with torch.no_grad():
        return meshc.compile(case.model.eval(), meshc.Mesh(mesh), kwargs=case.kwargs, plan=plan, **ask)


def module(case: Case, mesh: str, plan: str | None = None, **ask: Any) -> meshc.Program:
    """A module that takes part in autograd: a forward and a backward stage."""
    return meshc.compile(case.model, meshc.Mesh(mesh), kwargs=case.kwargs, plan=plan, **ask)


def gpt(batch: int = 4, layers: int = 1, **sizes: Any) -> Case:
    return models.nanogpt(batch=batch, seq=8, hidden=16, layers=layers, heads=4, vocab=13, **sizes)


def _scheduled(name: str) -> meshc.Options:
    return meshc.Options(pipeline=meshc.Pipelining(schedule=name))


def _open_batch() -> dict[str, Any]:
    return {"x": {0: torch.export.Dim("batch", min=2, max=64)}}


CASES: Final[dict[str, Callable[[], meshc.Program]]] = {
    "gpt dp tp": lambda: train(gpt(dropout=0.1), "dp=2,tp=2", clip=1.0),
    "gpt megatron_sp": lambda: train(gpt(tied=False), "tp=2", "megatron_sp", sgd=True),
    "gpt fsdp microbatches": lambda: train(gpt(layers=2), "dp_shard=2", clip=1.0, microbatches=2),
    "gpt fsdp regions": lambda: train(gpt(layers=2), "dp_shard=2", clip=1.0, sgd=True, backend="inductor"),
    "gpt float8 rows": lambda: train(gpt(), "dp_shard=2,tp=2", "precision *: float8 row", sgd=True),
    "mlp float8 blocks uneven": lambda: train(models.mlp(batch=128, width=384), "dp=2,tp=2", "precision *: float8 block", sgd=True),
    "gpt ulysses": lambda: train(gpt(), "cp=2", sgd=True),
    "gpt pipeline": lambda: train(gpt(8, 2), "pp=2", sgd=True, microbatches=4, options=_scheduled("1f1b")),
    "gpt pipeline fsdp": lambda: train(
        gpt(8, 2), "pp=2,dp_shard=2", clip=1.0, sgd=True, microbatches=2, options=_scheduled("zb_h1")
    ),
    "gpt inference": lambda: infer(gpt(), "tp=2"),
    "gpt pipeline inference": lambda: infer(gpt(4, 2), "pp=2,tp=2", options=meshc.Options(pipeline=meshc.Pipelining(microbatches=2))),
    "mlp zero2 uneven": lambda: train(models.mlp(batch=6, width=20), "dp=3", "zero2", sgd=True),
    "mlp fsdp module": lambda: module(models.mlp(batch=6, width=20), "dp_shard=3"),
    "mlp local module": lambda: module(
        models.mlp(batch=6, width=20), "dp=2,tp=2", inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))
    ),
    "mlp open sizes": lambda: infer(models.mlp(batch=6, width=20), "dp=2,tp=2", options=meshc.Options(dynamic=_open_batch())),
    "resnet dp": lambda: train(models.resnet(batch=4, width=4), "dp=2", sgd=True),
    "resnet mean of parts": lambda: train(
        models.resnet(batch=4, width=4), "dp=2", sgd=True, microbatches=2, batch_mix="mean_of_parts"
    ),
}  # fmt: skip
"""Name -> the compilation. Names are those of the files."""
