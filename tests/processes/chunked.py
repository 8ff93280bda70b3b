"""A head and loss in chunks on real ranks: steps as plain PyTorch takes them, and what is in memory meanwhile. A function is a check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshc
from meshc.cost import peak_memory
from tests.processes.reference import close, furthest, sgd, train
from tests.processes.session import run_checks

ROWS, SEQ, WORDS, CHUNKS = 8, 32, 640, 4

WATCHED = 6
"""Steps that are watched. One in forty finds gloo's threads still holding a collective's operands after its wait has returned; what a
program needs is what the least of its steps holds."""


class Alive(TorchDispatchMode):
    """What operators make, by storage: the most bytes that are there at once, and the largest that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        self.there = {key: (ref, size) for key, (ref, size) in self.there.items() if not ref.expired()}
        for value in tree_leaves(made):
            if isinstance(value, Tensor) and (storage := value.untyped_storage())._cdata not in before:
                self.there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self.there.values()))
        return made


def watched(step: Callable[[], Any]) -> Alive:
    with Alive() as alive:
        step()
    return alive


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Linear(16, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def trained(mesh: Any, chunks: str, **options: Any) -> tuple[meshc.Program, Alive]:
    """Two steps as plain PyTorch takes them; then some that are watched, of which the least is given back."""
    torch.manual_seed(0)
    model, ids = Words().double(), torch.randint(WORDS, (ROWS, SEQ))
    target = torch.where(torch.arange(SEQ) % 5 == 0, -100, ids)
    start = copy.deepcopy(model)

    def loss_of(output: Tensor, target: Tensor = target) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    step = meshc.TrainStep(model, optimizer=sgd(model.parameters()), loss=loss_of, clip_grad_norm=1.0)
    plan = f"dp: batch; store params, grads, state\n{chunks}"
    inputs: dict[str, Any] = {"args": (ids,), "kwargs": {"target": target}}
    program = meshc.compile(step, mesh, plan=plan, options=meshc.Options(**options), **inputs)
    losses = [program(ids, target=target).item() for _ in range(2)]
    wanted, twin, _ = train(start, loss_of, {"ids": ids}, sgd, steps=2)
    close(losses, wanted, 1e-10)
    state = program.state_dict(full=True)
    if state:
        assert furthest(state["model"], twin.state_dict())[0] < 1e-9
    alive = min((watched(lambda: program(ids, target=target)) for _ in range(WATCHED)), key=lambda step: step.most)
    predicted = peak_memory.peak_rank(program.compiled).peak.total
    assert 0.95 < predicted / alive.most < 1.05, (chunks, options, predicted, alive.most)
    return program, alive


LOGITS = ROWS // 2 * SEQ * WORDS * 8
"""Bytes of a rank."""


def never_whole(mesh: Any) -> None:
    """What is made is as predicted, whole and in chunks; in chunks no value is as large as half of a rank's logits."""
    _, alive = trained(mesh, "", remat="none")
    assert alive.largest == LOGITS, alive.largest
    _, alive = trained(mesh, f"chunk head: {CHUNKS}", remat="none")
    assert alive.largest < LOGITS // 2, alive.largest


def budgeted(mesh: Any) -> None:
    """A budget that says it of itself."""
    program, alive = trained(mesh, "", memory_budget=2 * LOGITS)
    assert any("the head and loss run in" in note for note in program.compiled.notes), program.compiled.notes
    assert peak_memory.peak_rank(program.compiled).total <= 2 * LOGITS and alive.largest <= LOGITS // 2, alive.largest


CHECKS: tuple[Callable[[Any], None], ...] = (never_whole, budgeted)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
