"""CPU seconds of compiling the demo Llama's training step for a 2x2 mesh, by phase; no process group, no Inductor.

    python bench/compile_time.py

The first compilation of a process also pays for what torch imports and sets up once; the bar is for that one.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CPU seconds of idle threads are no one's

import torch  # noqa: E402
from models import WORKLOADS  # noqa: E402
from tabulate import tabulate  # noqa: E402

import meshc  # noqa: E402

BAR_S = 5.0


def compile_once(plan: str) -> tuple[float, float, dict[str, float]]:
    """CPU seconds, seconds, and CPU seconds by phase."""
    workload = WORKLOADS["llama"]
    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    step = meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=1.0)
    batch = workload.batches(1)[0]
    cpu_start, start = time.process_time(), time.perf_counter()
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=batch, plan=plan)
    return time.process_time() - cpu_start, time.perf_counter() - start, dict(getattr(program, "timings", {}))


def main() -> None:
    rows: list[list[object]] = []
    runs = [compile_once("auto") for _ in range(2)]
    for phase in runs[0][2]:
        rows.append([phase, *(run[2].get(phase) for run in runs)])
    rows.append(["all, CPU s", *(run[0] for run in runs)])
    rows.append(["all, s", *(run[1] for run in runs)])
    print(tabulate(rows, ("phase", "first", "second"), floatfmt=".2f"))
    print(f"first compilation: {runs[0][0]:.1f} s of CPU; the bar is {BAR_S:.0f} s")


if __name__ == "__main__":
    main()
