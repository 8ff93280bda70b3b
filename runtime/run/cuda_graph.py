"""CUDA graph of a call: kernels and collectives recorded once, replayed with one launch.

    calls 1..WARM_UP   run eagerly (real calls; kernels tune themselves, NCCL connects)
    next call          is recorded over static inputs and then replayed
    later calls        copy inputs, seed, step and learning rates into place, and replay

Numbers that a kernel takes as floats (betas, eps) are baked in: when one changes, the call is recorded again. So are addresses: the buffers
of a cache, which a program writes in place, are read and written at their addresses and returned as they are. Other buffers (of another
text) are recorded at the second call in a row with them, so that two texts in turns run eagerly, and one text costs one recording; later
where recordings are hardly replayed, as with beams, which move rows to other buffers.
A call that cannot be recorded runs eagerly, with the reason in `status`.

Graphs that are alive at one time share a memory pool: their replays follow each other on one stream, and a call returns copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from meshc.frontend.loss_scaling import SCALE
from meshc.ir.keys import Kind, is_a
from meshc.runtime.state.stored_tensor import memory_of

if TYPE_CHECKING:
    from meshc.runtime.run.session import Session

WARM_UP = 3
WORTH: Final = 16
"""Replays after which a recording has paid off."""
ON_DEVICE = ("lr", SCALE)
"""Numbers that are read from device memory, so that their changes do not record again."""


KEPT: Final[tuple[Kind, ...]] = ("parameter", "state", "buffer", "constant")
"""Kinds of values with static addresses: they are always updated in place."""

Values = dict[str, torch.Tensor]
Recorded = tuple[Values, Callable[[], object]]
"""Results of a recorded call, at fixed addresses, and the function that replays the call into them."""


def refusal(
    device: torch.device, wanted: str | bool, mode: str, waits_on_device: bool, in_stages: bool = False, uses_host: bool = False,
    sends_rows: bool = False, has_backward: bool = False, has_cache: bool = False,
) -> str:
    """The reason why a program does not run as a CUDA graph; empty if it may."""
    if wanted is False:
        return "off: Options(debugging=Debugging(cuda_graph=False))"
    if device.type != "cuda":
        return f"off: the mesh is on {device.type}"
    if has_backward:
        return "off: backward is another call, and comes when it likes"
    if wanted == "auto" and mode != "step" and not has_cache:
        return "off: a call that is neither a step nor has a cache is recorded with Options(debugging=Debugging(cuda_graph=True)) alone"
    if not waits_on_device:
        return "off: the process group's backend waits on the host (use nccl)"
    if in_stages:
        return "off: messages between pipeline stages are posted by the host"
    if uses_host:
        return "off: copies to the host go beside it on streams of their own"
    if sends_rows:
        return "off: how many rows experts are sent is data, and the host waits for it"
    return ""


_ALIVE: Final[weakref.WeakSet[torch.cuda.CUDAGraph]] = weakref.WeakSet()


def record_graph(work: Callable[[], Values]) -> Recorded:
    """`work` as a CUDA graph. Raises RuntimeError if something in it cannot be recorded."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    pool = next((other.pool() for other in _ALIVE), None)
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        results = work()
    _ALIVE.add(graph)
    return results, graph.replay


class GraphedCalls:
    """Wraps a session's calls. `run` has the session's own signature."""

    def __init__(self, step: Session, must: bool, record: Callable[[Callable[[], Values]], Recorded] = record_graph) -> None:
        self.step = step
        self.must = must
        self.record = record
        self.calls = 0
        self.status = f"warming up: {WARM_UP} calls"
        self.replay: Callable[[], object] | None = None
        self.static: Values = {}
        self.moving: Values = {}
        """The static tensors into which the inputs of each call are copied."""
        self.handed_out: list[str] = []
        self.results: Values = {}
        self.baked: tuple[object, ...] = ()
        self.places: list[int] = []
        """Addresses of the lent inputs at the last call."""
        self.same = 0
        """Number of calls in a row with these addresses."""
        self.wait = 1
        """Number of such calls before a recording."""
        self.replayed = 0
        """Replays of the present recording."""

    def run(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, float]) -> Values:
        """One call; returns every value by key, as the session does."""
        values = self.step.values(tensors, numbers)
        self.calls += 1
        if self.calls <= WARM_UP or self.status.startswith("off"):
            return self.step.work(values)
        before, self.places = self.places, [memory_of(values[key]) for key in self.step.lent]
        self.same = self.same + 1 if self.places == before else int(not self.places)
        baked = (*sorted((k, v) for k, v in numbers.items() if k.split(".")[-1] not in ON_DEVICE), *self.places)
        if self.replay is None or baked != self.baked:
            if self.same < self.wait:
                return self.step.work(values)
            try:
                self._record(values)
            except RuntimeError as error:
                if self.must:
                    raise
                self.replay = None
                self.status = f"off: the call could not be recorded: {str(error).splitlines()[0]}"
                return self.step.work(values)
            self.baked = baked
        for key, static in self.moving.items():
            static.copy_(values[key], non_blocking=True)
        assert self.replay is not None
        self.replay()
        self.replayed += 1
        self.step.note_written()
        return {**self.results, **{key: self.results[key].clone() for key in self.handed_out}}

    def _record(self, values: Values) -> None:
        lent = {key: values[key] for key in self.step.lent}
        rest = {key: values[key] for key in values.keys() - lent.keys()}
        if self.places and self.replay is not None and self.replayed < WORTH:
            self.wait *= 2
        self.replay = None  # frees its memory for the new recording
        self.results, self.replayed = {}, 0
        self.static = {
            key: value if is_a(key, *KEPT) or value.device != self.step.device else value.clone() for key, value in rest.items()
        }
        self.moving = {key: static for key, static in self.static.items() if static is not rest[key]}
        self.results, self.replay = self.record(lambda: self.step.work({**self.static, **lent}))
        lying = {memory_of(value) for value in lent.values()}
        self.handed_out = [key for key, value in self.results.items() if is_a(key, "output", "metric") and memory_of(value) not in lying]
        self.status = "on"
