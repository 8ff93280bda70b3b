"""One rank of one measurement: every contender for one model and plan, built in turn, then timed in turn.

    torchrun --nproc-per-node 2 bench/measure.py '{"model": "llama", "plan": "ddp", ...}'

Started by `run.py`. Timed steps are interleaved (A B C, C B A, A B C, ...), so that whatever else the machine does hits all alike; a step
begins at a barrier and lasts until the slowest rank has finished. Memory and bytes are those of steps of their own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import statistics
import struct
import sys
import time
import traceback
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

CHECKED_STEPS = 5
LOSS_TOLERANCE = 1e-4


@dataclass
class Row:
    """What was found out about one contender. Bytes and seconds are the worst rank's."""

    title: str
    system: str
    mode: str
    fused: bool
    remat: str | None = None
    way: str | None = None
    budget: int | None = None
    again: str | None = None
    problem: str | None = None
    losses: list[float] = field(default_factory=list)
    loss_error: float | None = None
    build_s: float | None = None
    """Building, compiling and the first `CHECKED_STEPS` steps."""
    peak_bytes_per_rank: int | None = None
    predicted_bytes_per_rank: int | None = None
    """What the walk of `meshc.cost.peak_memory` says of that peak; None of peers."""
    grown_bytes_per_rank: int | None = None
    """How much the process had grown at most, since before it was built: what the kernel counts as resident, freed memory that malloc
    keeps and gloo's buffers included."""
    wire_bytes_per_rank: int | None = None
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of the rank's whole process in each timed step, gloo's threads included."""


class Peak:
    """The most bytes of tensors alive at once between `mark()` and the end, of all that was made since the beginning.

    Counted where torch's CPU allocator asks for memory and gives it back, on every thread and whoever asks (`tensors.cpp`, which `run.py`
    has loaded first): eager operators, Inductor's code, DDP's buckets, what gloo's threads free last. Gloo's own buffers are no tensors.
    """

    def __enter__(self) -> Peak:
        gc.collect()
        self._counted = ctypes.CDLL(None)
        for name in ("tensors_alive", "tensors_most"):
            getattr(self._counted, name).restype = ctypes.c_size_t
        self._before = self._counted.tensors_alive()
        self._counted.tensors_mark()
        return self

    def mark(self) -> None:
        gc.collect()
        self._counted.tensors_mark()

    def __exit__(self, *exception: Any) -> None:
        self.bytes = self._counted.tensors_most() - self._before


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


def resident(figure: str) -> int:
    """Bytes of this process that lie in memory: now (VmRSS) or at most so far (VmHWM)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(figure)]
    return int(line.split()[1]) * 1024


def holds(built: Built) -> int:
    """Bytes of tensors that the fullest rank holds beside its inputs, by the program's own walk; 0 of what meshc did not compile."""
    if built.program is None:
        return 0
    from meshc.cost import peak_memory  # here, so that the peers can be measured without it

    worst = peak_memory.peak_rank(built.program.compiled)
    return worst.total - worst.kept["input"]


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
            asked = (contender.remat, contender.way, contender.budget, contender.again)
            row = Row(contender.title(self.plan), contender.system, contender.mode, contender.fused, *asked)
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
        problem, built, losses, peak, predicted, grown = None, None, [], 0, 0, 0
        row.problem = "the ranks ended while this was built"
        self.save()
        if self._takes_part(contender):
            try:
                before = resident("VmRSS")
                with Peak() as tensors:
                    built = build(contender, self.workload, self.plan, self.mesh)
                    for batch in self.batches[:-1]:
                        losses.append(_number(built.step(batch)))
                    tensors.mark()
                    losses.append(_number(built.step(self.batches[-1])))
                peak, grown = tensors.bytes, resident("VmHWM") - before
                predicted = holds(built)
            except Exception as error:  # a row that cannot run says so; the others are measured
                traceback.print_exc()
                problem = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"[:300]
                row.problem = problem
                self.save()
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (problem, losses, peak, predicted, grown))
        row.build_s = time.perf_counter() - start
        row.problem = next((report[0] for report in reports if report[0]), None)
        if row.problem is not None:
            return
        row.losses = reports[0][1]
        if built is not None and built.mean_of_ranks or contender.system == "peer" and self.plan in ("ddp", "fsdp", "cp", "ep"):
            row.losses = [statistics.mean(values) for values in zip(*(report[1] for report in reports), strict=True)]
        row.peak_bytes_per_rank = max(report[2] for report in reports)
        row.predicted_bytes_per_rank = max(report[3] for report in reports) or None
        row.grown_bytes_per_rank = max(report[4] for report in reports)
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
