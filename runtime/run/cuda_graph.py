"""A training step as one CUDA graph: kernels and collectives recorded once, replayed with one launch.

    calls 1..WARM_UP   run as they are (they are real steps; kernels tune themselves, NCCL connects)
    next call          is recorded over static inputs and then replayed
    later calls        copy inputs, seed, step and learning rates into place, and replay

Numbers that a kernel takes as floats (betas, eps) are baked in: when one changes, the step is recorded again. What cannot be recorded runs
as it is, with the reason in `status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch

from meshc.ir.keys import Kind, is_a

WARM_UP = 3
ON_DEVICE = ("lr",)
"""Numbers that fused kernels read from device memory, so that a schedule does not record again."""


KEPT: Final[tuple[Kind, ...]] = ("parameter", "state", "buffer", "constant")
"""They are static already: they are updated in place for ever."""


class Step(Protocol):
    """What a session offers."""

    device: torch.device

    def values(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, float]) -> dict[str, torch.Tensor]: ...
    def work(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...


def refusal(
    device: torch.device, wanted: str | bool, mode: str, waits_on_device: bool, in_stages: bool = False, uses_host: bool = False,
    sends_rows: bool = False,
) -> str:
    """Why a program does not run as a CUDA graph; empty if it may."""
    if wanted is False:
        return "off: Options(cuda_graph=False)"
    if device.type != "cuda":
        return f"off: the mesh is on {device.type}"
    if mode != "step":
        return "off: only a TrainStep has static inputs and outputs"
    if not waits_on_device:
        return "off: the process group's backend waits on the host (use nccl)"
    if in_stages:
        return "off: messages between pipeline stages are posted by the host"
    if uses_host:
        return "off: copies to the host go beside it on streams of their own"
    if sends_rows:
        return "off: how many rows experts are sent is data, and the host waits for it"
    return ""


class GraphedStep:
    """Wraps a session's step. `run` has the session's own signature."""

    def __init__(self, step: Step, must: bool) -> None:
        self.step = step
        self.must = must
        self.calls = 0
        self.status = f"warming up: {WARM_UP} calls"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: dict[str, torch.Tensor] = {}
        self.results: dict[str, torch.Tensor] = {}
        self.baked: tuple[tuple[str, float], ...] = ()

    def run(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """One step; returns every value by key, as the session does."""
        values = self.step.values(tensors, numbers)
        self.calls += 1
        if self.calls <= WARM_UP or self.status.startswith("off"):
            return self.step.work(values)
        baked = tuple(sorted((k, v) for k, v in numbers.items() if k.split(".")[-1] not in ON_DEVICE))
        if self.graph is None or baked != self.baked:
            try:
                self._record(values)
            except RuntimeError as error:
                if self.must:
                    raise
                self.graph = None
                self.status = f"off: the step could not be recorded: {str(error).splitlines()[0]}"
                return self.step.work(values)
            self.baked = baked
        for key, static in self.static.items():
            fresh = values[key]
            if static.is_cuda and fresh is not static:
                static.copy_(fresh, non_blocking=True)
        assert self.graph is not None
        self.graph.replay()
        return {key: value.clone() if is_a(key, "output", "metric") else value for key, value in self.results.items()}

    def _record(self, values: dict[str, torch.Tensor]) -> None:
        self.static = {
            key: value if is_a(key, *KEPT) or not value.is_cuda else value.clone() for key, value in values.items()
        }
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.results = self.step.work(dict(self.static))
        self.graph = graph
        self.status = "on"
