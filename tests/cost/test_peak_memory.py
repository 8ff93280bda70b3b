"""The predicted peak of memory against live storage: every tensor that a call makes is watched until it is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshc
from meshc.cost import peak_memory
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding
from meshc.program.program import PlainProgram, Port
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run.executor import Executor
from tests.broad import broad
from tests.models import Case, llama, mlp, nanogpt


class Live(TorchDispatchMode):
    """The most bytes of storage alive at once, of what operators make beside what was there before."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in there}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return result


def value(port: Port, inputs: dict[str, Any]) -> torch.Tensor:
    if port.kind == "input":
        return inputs[port.name].clone()
    if port.dtype.is_floating_point:
        return torch.full(port.shape, 0.01, dtype=port.dtype)
    return torch.ones(port.shape, dtype=port.dtype)


def live_peak(program: PlainProgram, inputs: dict[str, Any]) -> int:
    """Of a program for one rank, run as a rank runs it."""
    values = {port.key: value(port, inputs) for port in program.inputs if port.kind != "constant"}
    with Live([*values.values(), *program.constants.values()]) as live, torch.no_grad():
        executor = Executor(program, Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu"))
        executor.run(values)
    return live.peak


def small() -> Case:
    return nanogpt(layers=1)


@pytest.mark.parametrize(
    "make, microbatches",
    [(mlp, 1), (mlp, 2), (small, 1), (small, 2), broad(nanogpt, 1), broad(nanogpt, 2), broad(llama, 1), broad(llama, 2)],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_the_peak_of_a_training_step(make: Callable[[], Case], microbatches: int) -> None:
    case = make()
    optimizer = torch.optim.AdamW(case.model.parameters())
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    program = meshc.compile(step, meshc.Mesh("dp=1"), kwargs=case.call_kwargs).compiled
    predicted, live = peak_memory.peak(program).total, live_peak(program, case.call_kwargs)
    assert predicted == pytest.approx(live, rel=0.01)


def test_what_torch_has_no_placement_for_is_there_twice() -> None:
    hidden = (Part("hidden", 64),)
    fused = Sharding(((Part("", 3), Part("heads", 4, ("tp",)), Part("head", 8)), hidden))
    plain = Sharding(((Part("heads", 4, ("tp",)), Part("head", 8)), hidden))
    mesh = Mesh("tp=2")
    for kind in ("parameter", "state"):
        assert peak_memory.copy_bytes(Port(kind, "w", (96, 64), torch.bfloat16, fused), mesh) == 96 * 64 * 2 // 2
        assert peak_memory.copy_bytes(Port(kind, "w", (32, 64), torch.bfloat16, plain), mesh) == 0
    assert peak_memory.copy_bytes(Port("input", "x", (96, 64), torch.bfloat16, fused), mesh) == 0
