"""Cells of the pipelines' table on real ranks, through `meshc.compile`: what the ranks of `python -m tests.pipelining --torchrun` run.

A TrainStep shows its gradients in the optimizer's state: after the first step Adam's first moment is (1 - beta1) times the clipped
gradient.
"""

from __future__ import annotations

import json
import warnings
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import meshc
from meshc.frontend import call_keys
from meshc.frontend.train_step import traced_step
from meshc.runtime.simulator import reference_comparison as verification
from meshc.runtime.simulator.plain_copy import plain_copy, widen, widen_inputs
from meshc.runtime.simulator.reference_comparison import Report
from meshc.runtime.simulator.reference_model import Reference
from tests.pipelining.cells import MICROBATCHES, STEPS, adamw
from tests.processes.session import device_mesh
from tests.zoo.run import case

CLIP: Final = 1.0


def check(family: str, schedule: str, mesh: Any) -> Report:
    """Rank 0's report: losses and gradient norms, every gradient of the first step, all parameters and buffers after each step, float64."""
    sample = case(family)
    widen(sample.model)
    inputs = widen_inputs(dict(sample.call_kwargs), True)
    twin = plain_copy(sample.model, None, True).train()
    step = meshc.TrainStep(
        sample.model.train(), optimizer=adamw(sample.model.parameters()), loss=sample.loss, clip_grad_norm=CLIP, microbatches=MICROBATCHES
    )
    program = meshc.compile(step, mesh, options=meshc.Options(pipeline=meshc.Pipelining(schedule=schedule), seed=0))
    _in_float64_throughout(program)
    traced = traced_step(step)
    args, kwargs = call_keys.canonical_call(traced, (), widen_inputs(inputs, True))
    reference = Reference(twin, traced.function, args, kwargs, 0, True)
    optimizer = adamw(twin.parameters())
    report = Report(verification.TOLERANCE[torch.float64])
    for number in range(STEPS):
        loss = program(**inputs)
        norm = program.metrics["grad_norm"]
        state = program.state_dict(full=True)
        if dist.get_rank() == 0:
            optimizer.zero_grad()
            wanted, _ = reference.train(number)
            wanted_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
            optimizer.step()
            report.add(f"loss of step {number}", {"loss": loss}, {"loss": wanted})
            report.add(f"norm of step {number}", {"norm": torch.as_tensor(norm)}, {"norm": wanted_norm})
            _compare_state(state, twin, number, report)
    return report


def _in_float64_throughout(program: meshc.Program) -> None:
    """As `meshc.verify` compiles: what a model computes in float32 whatever its dtype would hide errors of that size."""
    compilations = program.compilations
    request = compilations.request
    compilations.request = lambda given, **changes: request(given, double=True, **changes)  # type: ignore[method-assign]


def _compare_state(state: dict[str, Any], twin: torch.nn.Module, number: int, report: Report) -> None:
    parameters = dict(twin.named_parameters())
    if number == 0:
        beta = adamw(parameters.values()).param_groups[0]["betas"][0]
        slots = state["optim"]["state"]
        found = {name: slots[name]["exp_avg"] / (1 - beta) if name in slots else torch.zeros_like(p) for name, p in parameters.items()}
        wanted: dict[str, Tensor] = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
        report.add("gradient", found, wanted)
    left, buffers = twin.state_dict(), dict(twin.named_buffers())
    assert state["model"].keys() == left.keys(), sorted(state["model"].keys() ^ left.keys())
    for kind in ("parameter", "buffer"):
        names = [name for name in left if (name in buffers) == (kind == "buffer")]
        report.add(f"{kind} after step {number}", {name: state["model"][name] for name in names}, {name: left[name] for name in names})


def run(mesh: str, *cells: str) -> None:
    """`cells`: "family schedule", run one after another on one mesh; rank 0 prints a line of JSON for each."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    where = device_mesh(mesh)
    for cell in cells:
        report = check(*cell.split(), where)
        if dist.get_rank() == 0:
            assert report.rows and report.ok, f"{cell}\n{report}"
            print(json.dumps({"cell": f"{cell} {mesh}", "worst": report.worst, "compared": len(report.rows)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
