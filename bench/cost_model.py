"""Holds the cost model against the clock: predicted and measured seconds of training steps, in one process or data-parallel.

    meshc calibrate                                                  first: the prediction is as good as the figures are
    python bench/cost_model.py                                       half a minute
    python bench/cost_model.py --operators                           and where the time goes, by operator
    torchrun --nproc-per-node 2 -m meshc calibrate; torchrun --nproc-per-node 2 bench/cost_model.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import WORKLOADS
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import meshc
from meshc import ir
from meshc.cost import device_fit, microbenchmarks, peak_memory
from meshc.cost.devices import Device, devices_of
from meshc.cost.program_clock import program_seconds
from meshc.cost.roofline import seconds

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_llama import CLIP_GRAD_NORM, batches, build_model, build_optimizer

STEPS = 15


def demo() -> tuple[meshc.TrainStep, dict[str, Any]]:
    """The step of examples/train_llama.py."""
    model = build_model()
    optimizer, _ = build_optimizer(model, STEPS)
    (ids,) = batches(1, 8, 128)
    return meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=CLIP_GRAD_NORM), {"input_ids": ids, "labels": ids}


def workload(name: str) -> tuple[meshc.TrainStep, dict[str, Any]]:
    one = WORKLOADS[name]
    model = one.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return meshc.TrainStep(model, optimizer=optimizer, loss=one.loss), one.batches(1)[0]


def measured(program: meshc.Program, inputs: dict[str, Any]) -> float:
    """Seconds of the fastest step: what else runs on the machine only slows."""
    taken = []
    for _ in range(3 + STEPS):
        start = time.perf_counter()
        program(**inputs)
        taken.append(time.perf_counter() - start)
    return min(taken[3:])


def by_operator(program: meshc.Program, inputs: dict[str, Any], device: Device) -> str:
    """Milliseconds of a step by operator, as predicted and as the profiler has them (with what the operators call), largest first."""
    predicted: Counter[str] = Counter()
    runs = peak_memory.runs(program.compiled)
    for stage in program.compiled.stages.values():
        for node in ir.calls(stage.graph):
            predicted[ir.op_name(node).split(".")[1 if "." in ir.op_name(node) else 0]] += seconds(node, device) * runs[stage.name]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        program(**inputs)
    found: Counter[str] = Counter()
    for event in recorded.events():
        if event.cpu_parent is None:
            found[event.name.split("::")[-1]] += event.cpu_time_total / 1e6
    rows = [(name, 1e3 * predicted[name], 1e3 * found[name]) for name in dict.fromkeys([*predicted, *found])]
    rows.sort(key=lambda row: -max(row[1:]))
    return tabulate(rows[:25], headers=["operator", "predicted ms", "profiled ms"], floatfmt=".2f")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", action="store_true", help="where the time goes, by operator")
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    device = devices_of(meshc.Mesh.of(mesh)).slowest()
    say(f"{device.name}: {device.source}; this process has {torch.get_num_threads()} threads")
    rows = []
    for name, (step, inputs) in (("demo", demo()), ("mlp", workload("mlp")), ("nanogpt", workload("nanogpt"))):
        program = meshc.compile(step, mesh, kwargs=inputs)
        predicted, taken = program_seconds(program.compiled, device).total, measured(program, inputs)
        now = device_fit.rate(microbenchmarks.products(torch.device("cpu"), torch.float32), device.launch_s).figure / device.rate(
            torch.float32
        )
        rows.append((name, 1e3 * predicted, 1e3 * taken, predicted / taken, now))
        if options.operators:
            say(f"\n{name}\n{by_operator(program, inputs, device)}")
    say(tabulate(rows, headers=["step", "predicted ms", "measured ms", "ratio", "products now, of the calibrated rate"], floatfmt=".2f"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
