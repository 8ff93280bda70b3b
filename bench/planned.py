"""Holds the search against the clock: is what it finds as fast as the best recipe, and is what is predicted to be faster so?

    torchrun --nproc-per-node 2 -m meshc calibrate; torchrun --nproc-per-node 2 bench/planned.py
    torchrun --nproc-per-node 4 -m meshc calibrate; torchrun --nproc-per-node 4 bench/planned.py --rounds 7 --no-pairs

`--write` keeps what is printed under bench/results/.

First table: for each model the recipes and what `auto` finds, all in the same processes, their steps interleaved. *of best* is the median
of the ratios to the best recipe's neighbouring step, *CPU of best* likewise of the CPU seconds of the rank's process, gloo's threads
included: it leaves out waiting, and is the figure to look at when others use the machine's cores. Of two programs that are the same, line
for line, the later row says so (`auto, as ddp`): what they differ by is the noise of the table. Second table: pairs of plans that were
drawn by a fixed seed, among those whose predicted seconds differ by DIFFER or more, and how many are measured in the predicted order.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import WORKLOADS, Workload
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

import meshc
from meshc.cost import peak_memory
from meshc.cost.devices import devices_of
from meshc.cost.program_clock import program_seconds
from meshc.text.printer import print_program

BAR = 1.03
"""What the searched plan's step may take of the best recipe's."""
DIFFER = 1.10
SEED = 12
DRAWN = 20
"""Pairs of plans."""

RECIPES = {
    2: {"dp=2": ["ddp", "zero1", "fsdp"], "tp=2": ["megatron", "megatron_sp"], "cp=2": ["ulysses"]},
    4: {
        "dp=4": ["ddp", "zero1", "fsdp"], "tp=4": ["megatron", "megatron_sp"],
        "dp=2,tp=2": ["ddp+megatron", "fsdp+megatron", "ddp+megatron_sp", "fsdp+megatron_sp"],
    },
}  # fmt: skip
SEARCHED = {2: ["dp=2"], 4: ["dp=4", "dp=2,tp=2"]}

PAGE = """# What the search finds, against recipes and against the clock, on {ranks} CPU ranks

Two cores, each rank with one thread, gloo; calibrated just before.
Made by `bench/planned.py --write` (bench/README.md says what is measured).

```
{said}
```
"""


def page(ranks: int) -> Path:
    return Path(__file__).parent / "results" / f"planned-{ranks}-cpu-ranks.md"


@dataclass
class Contender:
    """A plan on a mesh. Seconds are the slowest rank's."""

    mesh: str
    plan: str
    title: str
    program: Any = None
    predicted_s: float = 0.0
    holds: int = 0
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    def of(self, other: Contender) -> float:
        return statistics.median(mine / theirs for mine, theirs in zip(self.step_s, other.step_s, strict=True))

    def cpu_of(self, other: Contender) -> float:
        return statistics.median(mine / theirs for mine, theirs in zip(self.cpu_s, other.cpu_s, strict=True))


def compiled(workload: Workload, contender: Contender, on: Any) -> Any:
    model = workload.build()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), loss=workload.loss)
    return meshc.compile(step, on, kwargs=workload.batches(1)[0], plan=contender.plan)


def built(workload: Workload, contender: Contender) -> Contender:
    axes = [axis.split("=") for axis in contender.mesh.split(",")]
    mesh = init_device_mesh("cpu", tuple(int(size) for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
    contender.program = compiled(workload, contender, mesh)
    program = contender.program.compiled
    contender.predicted_s, contender.holds = (
        program_seconds(program).total,
        peak_memory.peak_rank(program).total,
    )
    return contender


def lines(contender: Contender) -> list[str]:
    """What the ranks of a contender run, without the names of its axes, and without whose plan it is."""
    text = print_program(contender.program.compiled)
    for number, axis in enumerate(contender.mesh.split(",")):
        text = re.sub(rf"\b{axis.split('=')[0]}\b", f"axis{number}", text)
    return [line.split("  #")[0] for line in text.splitlines() if not line.startswith("plan")]


def timed(workload: Workload, contenders: list[Contender], rounds: int) -> None:
    """Steps of all in turn, each round in another order; two of each are not counted."""
    batch, order = workload.batches(1)[0], random.Random(SEED)
    for number in range(rounds + 2):
        for contender in order.sample(contenders, len(contenders)):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            contender.program(**batch)
            slowest = torch.tensor([time.perf_counter() - start, time.process_time() - cpu], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number >= 2:
                contender.step_s.append(float(slowest[0]))
                contender.cpu_s.append(float(slowest[1]))


def against_recipes(name: str, rounds: int) -> tuple[list[list[object]], bool]:
    """The rows of one model, and whether the searched plans are within the bar."""
    ranks, workload = dist.get_world_size(), WORKLOADS[name]
    recipes = [Contender(mesh, plan, plan) for mesh, plans in RECIPES[ranks].items() for plan in plans]
    searched = [Contender(mesh, "auto", "auto") for mesh in SEARCHED[ranks]]
    contenders = [built(workload, one) for one in (*recipes, *searched)]
    for number, one in enumerate(contenders):
        same = [other.title for other in contenders[:number] if lines(other) == lines(one)]
        one.title += f", as {same[0]}" if same else ""
    timed(workload, contenders, rounds)
    best = min(recipes, key=lambda one: one.median_s)
    rows: list[list[object]] = [
        [name, one.mesh, one.title, 1e3 * one.predicted_s, 1e3 * one.median_s, one.of(best), one.cpu_of(best), one.holds / 2**20]
        for one in contenders
    ]
    return rows, min(one.of(best) for one in searched) <= BAR


# --------------------------------------------------------------------------------------------------------------------- pairs of plans


def drawn(workload: Workload, random_: random.Random, count: int) -> list[Contender]:
    """Legal plans of one axis, none twice, with their predictions."""
    mesh = meshc.Mesh(f"x={dist.get_world_size()}")
    names = ["batch", "seq", "heads", "ffn", "vocab", "features"]
    found: dict[str, Contender] = {}
    for _ in range(8 * count):
        taken = random_.sample(names, random_.randint(1, 3))
        stored = [kind for kind in ("params", "grads", "state") if random_.random() < 0.4]
        plan = "x: " + "".join(f"{name}{random_.choice((', ', ' > '))}" for name in taken[:-1]) + taken[-1]
        plan += f"; store {', '.join(stored)}" if stored else ""
        if plan in found or len(found) == count:
            continue
        try:
            program = compiled(workload, Contender("x", plan, plan), mesh).compiled
        except meshc.PlanError:
            continue  # not legal for this model
        found[plan] = Contender(f"x={dist.get_world_size()}", plan, plan, predicted_s=program_seconds(program).total)
    return list(found.values())


def pairs(name: str, random_: random.Random, count: int, rounds: int) -> list[list[object]]:
    """Rows of as many pairs of one model's plans as are asked for, if so many differ."""
    workload = WORKLOADS[name]
    plans = drawn(workload, random_, max(4, count))
    differing = [pair for pair in combinations(plans, 2) if not 1 / DIFFER < pair[0].predicted_s / pair[1].predicted_s < DIFFER]
    chosen = random_.sample(differing, min(count, len(differing)))
    used = list({id(one): one for pair in chosen for one in pair}.values())
    for one in used:
        built(workload, one)
    timed(workload, used, rounds)
    rows: list[list[object]] = []
    for pair in chosen:
        fast, slow = sorted(pair, key=lambda one: one.predicted_s)
        measured = slow.of(fast)
        predicted = slow.predicted_s / fast.predicted_s
        rows.append([name, fast.plan, slow.plan, predicted, measured, slow.cpu_of(fast), "yes" if measured > 1 else "NO"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["llama", "nanogpt", "mlp"]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved timed steps of each contender")
    parser.add_argument("--no-pairs", action="store_true", help="leave out the pairs of plans")
    parser.add_argument("--write", action="store_true", help="keep what is printed under bench/results/")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if dist.get_rank() == 0:
            print(text, flush=True)

    device = devices_of(meshc.Mesh.of(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))))
    say(f"{device.name}: {device.source}")
    rows: list[list[object]] = []
    good = True
    for name in options.models:
        found, within = against_recipes(name, options.rounds)
        rows, good = rows + found, good and within
        heads = ["model", "mesh", "plan", "predicted ms", "measured ms", "of best", "CPU of best", "holds MiB"]
        say(tabulate(found, headers=heads, floatfmt=("", "", "", ".1f", ".1f", ".3f", ".3f", ".1f")))
    if not options.no_pairs:
        random_ = random.Random(SEED)
        each = -(-DRAWN // len(options.models))
        compared = [row for name in options.models for row in pairs(name, random_, each, options.rounds)][:DRAWN]
        say(
            tabulate(
                compared,
                headers=["model", "predicted faster", "predicted slower", "predicted", "measured", "CPU", "in order"],
                floatfmt=".2f",
            )
        )
        say(f"{sum(row[-1] == 'yes' for row in compared)} of {len(compared)} pairs are measured in the predicted order")
    ranks = dist.get_world_size()
    if options.write and dist.get_rank() == 0:
        page(ranks).write_text(PAGE.format(ranks=ranks, said="\n\n".join(said)))
    dist.destroy_process_group()
    return 0 if good or ranks != 2 else 1


if __name__ == "__main__":
    sys.exit(main())
