"""Base of the three phases: request, plan and mesh sizes, known before the first pass, with notes and pass times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from meshc.ir.mesh import DATA_ROLES, Mesh, axis_sizes, role
from meshc.ir.sizes import at
from meshc.ir.spmd import MICROBATCH
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.captured_depth import Depth
from meshc.passes.phases.request import OpenedDims, Request
from meshc.plan.plan import Plan
from meshc.plan.recipes import resolve
from meshc.program.microbatch_split import MicrobatchSplit


@dataclass(frozen=True, kw_only=True)
class CompilationPhase:
    """
    plan     the request's plan, resolved over its mesh
    sizes    by name, of the mesh's axes, and of the microbatch axis if there are several microbatches
    parts    set if the step is the mean of its microbatches: graphs before `microbatch` are then for one microbatch
    opened   set if a batch of 1 is padded; its size then stays symbolic until the end
    depth    set if some of the model's layers stand for others; until `grow` graphs have the captured layers only
    kept_whole  why a batch of 1 is not padded, where an axis has nothing else to split
    notes    messages for the user
    seconds  by pass, its run time
    """

    request: Request
    plan: Plan
    sizes: Mapping[str, int]
    parts: MicrobatchSplit | None = None
    opened: OpenedDims | None = None
    depth: Depth | None = None
    kept_whole: str = ""
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.request.mesh

    def with_notes(self, *notes: str) -> Self:
        return replace(self, notes=(*self.notes, *notes))

    def with_request(self, request: Request) -> Self:
        """The phase under another request, with that request's plan and microbatches; dims that were opened stay open."""
        own = begin(request)
        return replace(self, request=request, plan=own.plan, sizes=own.sizes)

    def with_optimizer(self, optimizer: OptimizerSpec | None) -> Self:
        """The phase with `optimizer` as adoption has left it: before, its spec refers to whole parameters."""
        return replace(self, request=replace(self.request, optimizer=optimizer))

    @property
    def local_batch(self) -> tuple[str, ...]:
        """Axes over which ranks pass their own parts of a batch; empty if all ranks pass the whole batch."""
        if self.request.inputs != "local":
            return ()
        return tuple(axis.name for axis in self.mesh.axes if role(axis.name) in DATA_ROLES and axis.size > 1)

    def real(self, size: int) -> int:
        """The actual size, where `size` is computed from a stand-in for an opened dim."""
        return size if self.opened is None else at(size, self.opened.values)


def begin(request: Request) -> CompilationPhase:
    """The first phase of a request: its plan and sizes."""
    sizes = axis_sizes(request.mesh) | ({MICROBATCH: request.count} if request.count > 1 else {})
    return CompilationPhase(request=request, plan=resolve(request.plan, request.mesh), sizes=sizes)


def phase_fields(phase: CompilationPhase) -> dict[str, Any]:
    """The fields that each phase passes on to the next, by name."""
    return {each.name: getattr(phase, each.name) for each in fields(CompilationPhase)}
