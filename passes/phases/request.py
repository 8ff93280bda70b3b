"""What a compilation is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from meshc.frontend.clipping import Clip
from meshc.frontend.dynamic import DynamicDims
from meshc.frontend.expert_capacity import Capacity
from meshc.frontend.gradient_hooks import Hooks
from meshc.frontend.read_places import Place
from meshc.ir.functions import Function
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Sharding
from meshc.ir.sizes import PREFIX
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.choices import Known
from meshc.passes.schedules.kind import Lists
from meshc.plan.plan import Plan


@dataclass(frozen=True)
class Joined:
    """How inputs were put together of ranks' parts: by input along which dim, None if it has no batch; of how many parts, 0 if they have
    different numbers of rows."""

    dims: Mapping[str, int | None]
    ranks: int


@dataclass(frozen=True)
class Request:
    """What the user asked for, in one value.

    function      called as function(module, *args, **kwargs); its output is the program's
    train         the output is a loss: gradients, and the update if there is an optimizer, are part of the program
    adds          of a training step: gradients are added to those of the calls before, and nothing is updated
    hooks         by parameter, what its gradient is given to before it is clipped and updated with
    microbatches  None: as many as are predicted to be fastest
    joined        of inputs of which each rank has a part: how they were put together
    batch_mix     "mean_of_parts": with several microbatches, the step is the mean of what each gives alone
    fixed         storage of parameters that another program of the same model has settled
    offloaded        names of those of them that lie on the host by it
    dynamic       which dims of the inputs are left open
    schedule      of a pipeline: a name, each rank's list as text, or a function that makes these lists
    stages_per_rank  of a pipeline; None: as many as the schedule wants
    memory_budget  bytes that a rank may hold; None: of a GPU its memory, for what is not named
    host_budget   bytes of its host that a rank may have to keep that budget; None: what the plan says alone lies there
    gather_once   of a pipeline: whether parameters that are stored split may be gathered once a call, where that is expected to fit
    pp_splits     modules at which the second and further stages of a pipeline begin
    check_indices  labels and indices that their reader has no row for are refused
    backend       what will run the program
    searched      what a search has found already for the axes that the plan leaves open; None: it is searched for
    depth         "whole": all layers are captured; "auto": of those that are proved equal, a few
    remat         what backward recomputes of forward: a policy's name; None: what keeps `memory_budget`, or what takes little
    attention     "ring", "zigzag" or "gather": how keys come where the sequence is split; None: what is predicted to be faster
    must_pass     with "ring" or "zigzag": attention whose keys cannot pass round is refused; False: they are gathered, and a note says so
    recurrence    "turns" or "join": how ranks take the steps of a split sequence; None: what is predicted to be faster
    expert_bound  places for rows of experts that a rank has, in multiples of what it has if all are chosen alike; None: the worst case
    expert_dispatch  "flat", "hierarchical" or "auto": how rows go to experts on other nodes
    expert_capacity  what an expert takes of the tokens that choose it; None: all
    expert_bias_update  by how much routers' biases change after a step, towards experts that were chosen less; None: they do not
    chunks        in how many chunks of their tokens a step's head and loss run, 1: whole; None: as the plan says
    spare         bytes of that budget that are left to what passes after `recompute` and `stages` add
    beaten_s      what a plan on another mesh takes: what cannot be faster is not made, and Beaten is raised; None: none is known
    numbers       where numbers of Python stand that are inputs of the program
    owners        coordinate on the pipeline axis, by key, of what another program of the same model has settled
    """

    module: nn.Module
    function: Function
    signature: Function
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    mesh: Mesh
    plan: str | Plan | Mapping[str, object] | Iterable[str] | None = None
    grad: bool = False
    train: bool = False
    optimizer: OptimizerSpec | None = None
    adds: bool = False
    hooks: Mapping[str, Hooks] = field(default_factory=dict)
    clip_grad_norm: Clip = None
    microbatches: int | None = 1
    inputs: str = "global"
    joined: Joined | None = None
    outputs: str = "plain"
    names: Mapping[str, Sequence[str | None]] | None = None
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    double: bool = False
    batch_mix: str = "refuse"
    fixed: Mapping[str, Sharding] = field(default_factory=dict)
    offloaded: frozenset[str] = frozenset()
    dynamic: DynamicDims = DynamicDims()
    schedule: str | Lists | None = None
    stages_per_rank: int | None = None
    pp_splits: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    memory_budget: int | None = None
    host_budget: int | None = None
    gather_once: bool = True
    check_indices: bool = True
    backend: str = "eager"
    searched: Known | None = None
    depth: str = "auto"
    remat: str | None = None
    attention: str | None = None
    must_pass: bool = False
    recurrence: str | None = None
    expert_bound: float | None = None
    expert_dispatch: str = "auto"
    expert_capacity: Capacity | None = None
    expert_bias_update: float | None = None
    chunks: int | None = None
    spare: int = 0
    beaten_s: float | None = None
    numbers: tuple[Place, ...] = ()

    @property
    def count(self) -> int:
        """How many microbatches there are, once that is settled."""
        return self.microbatches or 1


@dataclass(frozen=True)
class Opened:
    """Dims of 1 of the inputs that are traced with their size open, so that they have factors, and the axes that want them for it."""

    dims: DynamicDims
    axes: frozenset[str]

    @property
    def values(self) -> dict[str, int]:
        """What is put in at the end, by symbol."""
        return {PREFIX + name: 1 for name in self.dims.ranges}
