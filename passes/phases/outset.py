"""Outset: what is known before the first pass, and stays known in every phase; what has been said and taken so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from meshc.ir.mesh import DATA_ROLES, Mesh, role
from meshc.ir.sizes import at
from meshc.ir.spmd import MICROBATCH
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.depth import Depth
from meshc.passes.phases.request import Opened, Request
from meshc.plan.plan import Plan
from meshc.plan.recipes import resolve
from meshc.program.parts import Parts


@dataclass(frozen=True, kw_only=True)
class Outset:
    """
    plan     the request's, over its mesh
    sizes    of the mesh's axes, and of that of the microbatches if there are several
    parts    set if the step is the mean of its microbatches: graphs before `microbatch` are then those of one of them
    opened   set if a batch of 1 is padded; until the end its size is open then
    depth    set if some of the model's layers stand for others; until `grow` graphs are those of the layers that are captured
    kept_whole  why one is not, where an axis has nothing else to split
    notes    what the user is to be told
    seconds  of each pass that has run
    """

    request: Request
    plan: Plan
    sizes: Mapping[str, int]
    parts: Parts | None = None
    opened: Opened | None = None
    depth: Depth | None = None
    kept_whole: str = ""
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.request.mesh

    def noting(self, *notes: str) -> Self:
        return replace(self, notes=(*self.notes, *notes))

    def asked(self, request: Request) -> Self:
        """The same under another request: its plan and its microbatches, whatever was opened stays open."""
        own = begin(request)
        return replace(self, request=request, plan=own.plan, sizes=own.sizes)

    def updating(self, optimizer: OptimizerSpec | None) -> Self:
        """The same for what an optimizer has become when it was adopted: what it was holds whole parameters."""
        return replace(self, request=replace(self.request, optimizer=optimizer))

    @property
    def local_batch(self) -> tuple[str, ...]:
        """The axes over which ranks pass parts of a batch of their own; none if all pass the whole."""
        if self.request.inputs != "local":
            return ()
        return tuple(axis.name for axis in self.mesh.axes if role(axis.name) in DATA_ROLES and axis.size > 1)

    def real(self, size: int) -> int:
        """A size as it will be, where one that stands for it decides otherwise."""
        return size if self.opened is None else at(size, self.opened.values)


def begin(request: Request) -> Outset:
    """What a request says by itself."""
    sizes = {axis.name: axis.size for axis in request.mesh.axes} | ({MICROBATCH: request.count} if request.count > 1 else {})
    return Outset(request=request, plan=resolve(request.plan, request.mesh), sizes=sizes)


def carried(phase: Outset) -> dict[str, Any]:
    """What a phase hands on to the next, by field."""
    return {each.name: getattr(phase, each.name) for each in fields(Outset)}
