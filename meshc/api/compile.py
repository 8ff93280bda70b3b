"""`meshc.compile`: the `Program` of a module, TrainStep, function or ExportedProgram on a mesh, compiled now or at the first call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshc.api import module_mode
from meshc.api.compile_arguments import CompileArguments
from meshc.api.handle import Program
from meshc.api.world import World
from meshc.frontend import admission, exported
from meshc.ir.functions import Function
from meshc.ir.mesh import Mesh
from meshc.options import Options
from meshc.plan.recipes import PlanLike
from meshc.runtime.agreement.compare import together
from meshc.runtime.failure.failed_rank import announce
from meshc.runtime.run.announced_step import TrainStep

DEFAULTS = Options()


def compile(
    what: nn.Module | TrainStep | Function,
    mesh: Mesh | DeviceMesh,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    plan: PlanLike = None,
    inputs: str = "global",
    outputs: str = "plain",
    backend: str = "eager",
    names: Mapping[str, Sequence[str | None]] | None = None,
    options: Options = DEFAULTS,
) -> Program:
    """Compile a module, a TrainStep, a function or an ExportedProgram for a mesh.

    mesh      a torch.distributed.DeviceMesh with axis names, or a `meshc.Mesh("dp=2,tp=4")`, which needs no process group
    args, kwargs  example inputs, as in torch.export; meta tensors will do. A module with trainable parameters needs them;
              an ExportedProgram brings its own, unless each rank passes a part
    plan      None: what each axis's name stands for, and a search for an axis whose name stands for nothing. A recipe ("fsdp+megatron_sp"),
              or lines of the plan grammar (docs/plans.md). "auto": what all axes do is searched for (docs/planner.md)
    inputs    "global": the same whole tensors on every rank. "local": each rank's part of the batch, along the dim where the model has it
              (docs/data.md)
    outputs   "plain": whole tensors come back. "dtensor": they stay as they lie
    backend   "eager", or "inductor" for compiled regions between collectives
    names     names for dims of inputs: {"input_ids": ("batch", "seq")}; of torch's recurrent layers {"src": ("seq", "batch")}. None for a
              dim of which nothing is said

    Raises PlanError, CaptureError, CompileError or StateError, each saying what to change.
    """
    board = announce()
    if isinstance(mesh, Mesh) and mesh.device_mesh is None:
        board = None
    with together(board, "compile"):
        admission.refuse_examples(args, kwargs)
        args, kwargs = tuple(args), dict(kwargs or {})
        if not args and not kwargs and inputs == "global":
            args, kwargs = exported.examples(what)
        asked = CompileArguments(what, mesh, plan, inputs, outputs, backend, names, options)
        program = Program(asked, World(asked.mesh, board))
        if not args and not kwargs and asked.step is None:
            module_mode.refuse_unknown_inputs(asked.module)
    if args or kwargs:
        program.prepare(args, kwargs)
    else:
        program.run_by_model()
    return program
