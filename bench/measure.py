"""One rank of one measurement: every contender for one model and plan, built in turn, then timed in turn.

    torchrun --nproc-per-node 2 bench/measure.py '{"model": "llama", "plan": "ddp", ...}'

Started by `run.py`. Timed steps are interleaved (A B C, C B A, A B C, ...), so that whatever else the machine does hits all alike; a step
begins at a barrier and lasts until the slowest rank has finished. Memory and bytes are those of steps of their own.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import WORKLOADS, Batch, Workload
from peers import AXIS_OF, Built, Contender, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

CHECKED_STEPS = 5
LOSS_TOLERANCE = 1e-4


@dataclass
class Row:
    """What was found out about one contender. Bytes and seconds are the worst rank's."""

    title: str
    system: str
    mode: str
    fused: bool
    remat: str = "none"
    problem: str | None = None
    losses: list[float] = field(default_factory=list)
    loss_error: float | None = None
    build_s: float | None = None
    """Building, compiling and the first `CHECKED_STEPS` steps."""
    peak_bytes_per_rank: int | None = None
    wire_bytes_per_rank: int | None = None
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of the rank's whole process in each timed step, gloo's threads included."""


class Peak:
    """The most bytes of tensors alive at once between `mark()` and the end, of all that was allocated since the beginning.

    Counts every allocation of torch's CPU allocator on this process, whoever makes it: eager operators, Inductor's code, DDP's buckets.
    Gloo's own buffers are not tensors and are left out. What gloo's threads free last is not recorded: it is gone when its place is used
    again.
    """

    def __enter__(self) -> Peak:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()
        self._marked_ns = time.time_ns()
        return self

    def mark(self) -> None:
        gc.collect()
        self._marked_ns = time.time_ns()

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        live: dict[int, int] = {}
        alive = peak = 0
        for at_ns, place, change in sorted(_allocations(self._profile.profiler.kineto_results.experimental_event_tree())):
            if at_ns >= self._marked_ns:
                peak = max(peak, alive)
            alive -= live.pop(place, 0)
            if change > 0:
                live[place] = change
                alive += change
        self.bytes = max(peak, alive)


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """(time in ns, address, bytes, negative where they are freed) below these events of a profile."""
    for event in events:
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)


TCP_INFO_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in linux/tcp.h's struct tcp_info; bytes_sent would count retransmissions


def bytes_sent() -> dict[str, int]:
    """Bytes that each open TCP socket of this process has delivered; gloo moves everything over TCP, also inside one machine."""
    sent = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(entry)
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    (sent[name],) = struct.unpack_from("Q", info, TCP_INFO_BYTES_ACKED)
        except OSError:
            continue  # closed meanwhile
    return sent


class Bench:
    def __init__(self, workload: Workload, plan: str, mesh: DeviceMesh, contenders: list[Contender], out: Path) -> None:
        self.workload, self.plan, self.mesh = workload, plan, mesh
        self.rank = dist.get_rank()
        self.batches = workload.batches(CHECKED_STEPS)
        self.contenders = contenders
        self.out = out
        self.rows: list[Row] = []
        self.ready: list[tuple[Row, Contender, Built]] = []

    def run(self, pairs: int) -> None:
        for contender in self.contenders:
            row = Row(contender.title(self.plan), contender.system, contender.mode, contender.fused, contender.remat)
            self.rows.append(row)
            self._prepare(contender, row)
        gc.collect()
        gc.freeze()  # a collection would otherwise walk all that the others built
        for row, contender, built in self.ready:
            row.wire_bytes_per_rank = self._wire_bytes(contender, built)
        for round_ in range(pairs):
            for row, contender, built in self.ready[:: 1 if round_ % 2 == 0 else -1]:
                wall_s, cpu_s = self._timed(contender, built, self.batches[round_ % CHECKED_STEPS])
                row.step_s.append(wall_s)
                row.cpu_s.append(cpu_s)

    def save(self) -> None:
        """Kept after each contender, since one that breaks the process group takes all down; `run.py` then goes on without it."""
        if self.rank == 0:
            self.out.write_text(json.dumps([asdict(row) for row in self.rows]))

    def _takes_part(self, contender: Contender) -> bool:
        return contender.system != "single" or self.rank == 0

    def _prepare(self, contender: Contender, row: Row) -> None:
        """Builds a contender and checks its losses; what fails on one rank is left out on all."""
        start = time.perf_counter()
        problem, built, losses, peak = None, None, [], 0
        row.problem = "the ranks ended while this was built"
        self.save()
        if self._takes_part(contender):
            try:
                with Peak() as tensors:
                    built = build(contender, self.workload, self.plan, self.mesh)
                    for batch in self.batches[:-1]:
                        losses.append(_number(built.step(batch)))
                    tensors.mark()
                    losses.append(_number(built.step(self.batches[-1])))
                peak = tensors.bytes
            except Exception as error:  # a row that cannot run says so; the others are measured
                traceback.print_exc()
                problem = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"[:300]
                row.problem = problem
                self.save()
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (problem, losses, peak))
        row.build_s = time.perf_counter() - start
        row.problem = next((problem for problem, _, _ in reports if problem), None)
        if row.problem is not None:
            return
        row.losses = reports[0][1]
        if built is not None and built.mean_of_ranks or contender.system == "peer" and self.plan in ("ddp", "fsdp"):
            row.losses = [statistics.mean(values) for values in zip(*(losses for _, losses, _ in reports), strict=True)]
        row.peak_bytes_per_rank = max(peak for _, _, peak in reports)
        reference = self.rows[0].losses
        row.loss_error = max(abs(a - b) for a, b in zip(row.losses, reference, strict=True))
        if not row.loss_error <= LOSS_TOLERANCE:
            row.problem = f"WRONG: losses differ from the single process by {row.loss_error:.1e}"
            return
        self.ready.append((row, contender, built))  # type: ignore[arg-type]

    def _wire_bytes(self, contender: Contender, built: Built) -> int:
        dist.barrier()
        before = bytes_sent()
        if self._takes_part(contender):
            built.step(self.batches[0])
        time.sleep(0.05)  # bytes are counted when they are acknowledged
        after = bytes_sent()
        return int(_worst([sum(after.values()) - sum(before.get(name, 0) for name in after)])[0])

    def _timed(self, contender: Contender, built: Built, batch: Batch) -> list[float]:
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        if self._takes_part(contender):
            built.step(batch)
        return _worst([time.perf_counter() - start, time.process_time() - cpu_start])


def _number(loss: Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def _worst(values: list[float]) -> list[float]:
    """Each figure's largest over the ranks."""
    worst = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def main() -> None:
    request = json.loads(sys.argv[1])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))  # a rank may compile for minutes
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS_OF[request["plan"]],))
    contenders = [Contender(**contender) for contender in request["contenders"]]
    bench = Bench(WORKLOADS[request["model"]], request["plan"], mesh, contenders, Path(request["out"]))
    bench.run(request["pairs"])
    bench.save()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
