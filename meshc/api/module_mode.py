"""Refusals for compiled modules outside a TrainStep: unknown inputs, pipeline stages, gradients or state stored unlike parameters."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from meshc.errors import PlanError, StateError
from meshc.ir.mesh import Mesh
from meshc.plan.entries import STORES
from meshc.plan.plan import Plan


def refuse_unknown_inputs(module: nn.Module) -> None:
    """A module that takes part in autograd cannot wait for its first call to know its inputs."""
    if any(p.requires_grad for p in module.parameters()) and torch.is_grad_enabled():
        dummy = getattr(module, "main_input_name", None) in getattr(module, "dummy_inputs", ())  # of transformers, where they fit the model
        raise StateError(
            "this module has trainable parameters, which compile replaces, so it must know the inputs now.\n"
            f"  what to do: meshc.compile(model, mesh, kwargs={'model.dummy_inputs' if dummy else '{...example inputs...}'}); "
            "meta tensors will do.\n"
            "  for inference: compile under torch.no_grad()"
        )


def refuse_stages(mesh: Mesh) -> None:
    """A module that takes part in autograd is not cut into pipeline stages: its backward runs when torch asks for it, on every rank."""
    axis = mesh.pipeline_axis
    if axis is not None:
        raise PlanError(
            f"axis {axis}: pipeline stages need the whole step, forward and backward, and this module is called by itself\n"
            "  what to do: meshc.compile(meshc.TrainStep(model, optimizer=...), mesh), or call it under torch.no_grad()"
        )


def refuse_partial_storage(plan: Plan) -> None:
    """In module mode gradients and optimizer state are torch.optim's, and follow the parameters' placement."""
    faults = [
        f"{entry.where}: it stores {', '.join(entry.store)} split, and parameters whole"
        for entry in plan.axes
        if entry.store and "params" not in entry.store
    ]
    faults += [
        f"{line.where}: it is about {', '.join(line.kinds)}, and not about {', '.join(kind for kind in STORES if kind not in line.kinds)}"
        for line in plan.stores
        if line.kinds != STORES
    ]
    if faults:
        advice = ["compile meshc.TrainStep(model, optimizer=...) for zero1 and zero2, or use the recipe fsdp (or ddp)"]
        advice += [f"write `{replace(line, kinds=STORES)}`, which says it of all three" for line in plan.stores if line.kinds != STORES][:1]
        raise PlanError(
            "\n".join(faults)
            + "\n  why: outside a TrainStep the optimizer is torch's own, and its state lies as the parameters do\n"
            + "  what to do: "
            + "; ".join(advice)
        )
