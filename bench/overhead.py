"""What a call costs beside its operators: microseconds of each gate that it passes, of a small model and of a stock Llama, on one rank.

    python bench/overhead.py              # forward without gradients, forward with them, a training step
    python bench/overhead.py --calls 1000

A gate's time is its own, without that of gates inside it; timing a gate takes about half a microsecond, which is in its row. `all but the
executor` is timed by itself: a call less what the executor takes, where nothing else is timed. Medians of interleaved calls.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from meshc.api.compilations import Compilations
from meshc.api.handle import Program, outer_transforms
from meshc.api.world import World
from meshc.runtime.run.executor import Executor
from meshc.runtime.run.session import Session
from meshc.runtime.state.optimizer_counts import OptimizerCounts

GATES: tuple[tuple[str, Any, str], ...] = (
    ("there are ranks", World, "refuse_call"),
    ("no transform is outside", outer_transforms, "refuse_around"),
    ("one thread, no failed rank", Program, "guarded"),
    ("arguments, their form and key", Compilations, "admit"),
    ("a compilation for the key", Compilations, "prepare"),
    ("the model is as it was, inputs fit", Session, "check"),
    ("what ranks pass alike", Compilations, "compare"),
    ("the call begins", World, "begin"),
    ("whole inputs are the same", Session, "compare_inputs"),
    ("numbers of the optimizer", OptimizerCounts, "read_changes"),
    ("tiles of inputs and parameters", Session, "values"),
    ("new values are stored", Session, "finish"),
    ("counts of the optimizer", OptimizerCounts, "write_back"),
    ("the output", Session, "build_output"),
    ("the executor", Executor, "perform"),
)
EXECUTOR = GATES[-1][0]
REST = "all else"


class Clock:
    """Seconds of gates, each without the gates inside it."""

    def __init__(self) -> None:
        self.own: dict[str, float] = defaultdict(float)
        self._open: list[list[float]] = []

    def time(self, label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._open.append([0.0])
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            taken = time.perf_counter() - start
            (inside,) = self._open.pop()
            self.own[label] += taken - inside
            if self._open:
                self._open[-1][0] += taken

    def gate(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            made = self.time(label, function, *args, **kwargs)
            return Entered(self, label, made) if label == GATES[2][0] else made

        return timed


class Entered:
    """A context whose entry and exit are timed."""

    def __init__(self, clock: Clock, label: str, context: Any) -> None:
        self.clock, self.label, self.context = clock, label, context

    def __enter__(self) -> Any:
        return self.clock.time(self.label, self.context.__enter__)

    def __exit__(self, *error: Any) -> Any:
        return self.clock.time(self.label, self.context.__exit__, *error)


def timed_call(call: Callable[[], object], gates: tuple[tuple[str, Any, str], ...]) -> dict[str, float]:
    """Seconds of one call, by gate; what is in none of them is REST."""
    clock = Clock()
    patches = [mock.patch.object(where, name, clock.gate(label, getattr(where, name))) for label, where, name in gates]
    for patch in patches:
        patch.start()
    clock.time(REST, call)
    for patch in patches:
        patch.stop()
    return clock.own


def measure(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Microseconds by gate, medians; `all but the executor` of calls in which only that is timed."""
    for _ in range(20):
        call()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(calls):
        for label, seconds in timed_call(call, GATES).items():
            found[label].append(seconds)
        found["all but the executor"].append(timed_call(call, GATES[-1:])[REST])
    return {label: 1e6 * statistics.median(seconds) for label, seconds in found.items()}


def small() -> tuple[nn.Module, dict[str, torch.Tensor], Callable[..., torch.Tensor] | None]:
    """A model of width 16, its inputs and its loss."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    return model, {"input": torch.randn(4, 16), "target": torch.randn(4, 16)}, F.mse_loss


def llama() -> tuple[nn.Module, dict[str, torch.Tensor], Callable[..., torch.Tensor] | None]:
    """A stock Llama of 8 layers, whose own loss is taken."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, vocab_size=256
    )
    ids = torch.randint(256, (2, 16))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    for build in (small, llama):
        columns: dict[str, dict[str, float]] = {}
        torch.manual_seed(0)
        model, inputs, loss = build()
        forward = inputs if loss is None else {"input": inputs["input"]}
        program = meshc.compile(model, mesh, kwargs=forward)
        with torch.no_grad():
            columns["forward"] = measure(partial(program, **forward), calls)
        columns["with gradients"] = measure(partial(program, **forward), calls)
        model, inputs, loss = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=loss), mesh, kwargs=inputs)
        columns["a step"] = measure(partial(step, **inputs), calls)
        labels = [*(label for label, _, _ in GATES[:-1]), REST, "all but the executor", EXECUTOR]
        rows = [[label, *(column.get(label) for column in columns.values())] for label in labels]
        print(f"\n{build.__doc__}\n")
        print(tabulate(rows, headers=("microseconds", *columns), floatfmt=".1f"), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
