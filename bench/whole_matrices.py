"""What a step with Muon takes where each rank computes with its share of the matrices, of the one in which every rank does with all.

    torchrun --nproc-per-node 2 bench/whole_matrices.py
    torchrun --nproc-per-node 2 bench/whole_matrices.py --plan fsdp --layers 4 --width 384 --pairs 5

Layers are squares of one width and the batch is small, so that the step is little but its update; one thread a rank. The two take turns,
and a row has the medians and their ratio. The program that is not divided is compiled by a pass that finds nothing.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import meshc  # noqa: E402
from meshc.passes.lower import divide_updates as divide


def compiled(model: nn.Module, plan: str | None, *batch: torch.Tensor) -> meshc.Program:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    step = meshc.TrainStep(model, optimizer=torch.optim.Muon(model.parameters()), loss=F.mse_loss)
    return meshc.compile(step, mesh, args=batch[:1], kwargs={"target": batch[1]}, plan=plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="as meshc.compile takes it: none keeps all on every rank, fsdp stores tiles")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=7)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(asked.width, asked.width, bias=False) for _ in range(asked.layers)))
    batch = torch.randn(4, asked.width), torch.randn(4, asked.width)
    with mock.patch.object(divide, "chains", lambda graph: []):
        ways = {"every rank all": compiled(copy.deepcopy(layers), asked.plan, *batch)}
    ways["each its share"] = compiled(layers, asked.plan, *batch)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.pairs + 2):
        for name, program in ways.items():
            dist.barrier()
            start = time.perf_counter()
            program(batch[0], target=batch[1])
            dist.barrier()
            took[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(found[2:]) for name, found in took.items()}  # the first two warm up
    if dist.get_rank() == 0:
        rows = [(name, f"{median:.1f}", f"{median / medians['every rank all']:.3f}") for name, median in medians.items()]
        print(tabulate(rows, headers=("update", "ms a step", "ratio"), disable_numparse=True))
        print(*(note for note in ways["each its share"].compiled.notes if "whole matrices" in note), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
