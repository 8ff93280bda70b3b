"""Request of a compilation: model, arguments, mesh, plan and options as one value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from meshc.frontend.clipping import Clip
from meshc.frontend.dynamic_dims import DynamicDims
from meshc.frontend.gradient_hooks import Hooks
from meshc.frontend.read_places import ReadPlace
from meshc.ir.functions import Function
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Sharding
from meshc.ir.sizes import PREFIX
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.options import Options
from meshc.passes.phases.choices import NamedChoices
from meshc.plan.plan import Plan


@dataclass(frozen=True)
class JoinedInputs:
    """How inputs were joined from the parts of ranks. `dims`: by input, the dim of the joint; None if it has no batch. `ranks`: the number
    of parts; 0 if they have different numbers of rows."""

    dims: Mapping[str, int | None]
    ranks: int


@dataclass(frozen=True)
class Request:
    """The user's request of one compilation.

    function      called as function(module, *args, **kwargs); its output is the program's
    train         the output is a loss: gradients, and the update if there is an optimizer, are part of the program
    adds          gradient accumulation: a training step adds gradients to those of the calls before, and nothing is updated
    hooks         by parameter, hooks that run on its gradient before clipping and the update
    scales_loss   the loss is multiplied by a number of each call, and a step whose gradients are not finite is skipped
    microbatches  a TrainStep's, or an option's, once it is decided; None: as many as are predicted to be fastest
    options       the user's, or what passes try in their place
    joined        how inputs were joined, where each rank passes a part
    batch_mix     "mean_of_parts": with several microbatches, the step is the mean of the microbatches' own results
    fixed         storage of parameters, as another program of the same model has fixed it
    offloaded     names of parameters of `fixed` that are kept on the host
    dynamic       which dims of the inputs are left open
    gather_once   of a pipeline: whether parameters that are stored split may be gathered once a call, where that is expected to fit
    backend       what will run the program
    searched      an earlier search's result for the axes that the plan leaves open; None: they are searched
    must_pass     of attention "ring" or "zigzag": what cannot pass its keys round is refused, as the user has asked for one of them; False:
                  they are gathered, and a note says so
    chunks        number of chunks of tokens in which a step's head and loss run, 1: whole; None: as the plan says
    spare         bytes of `memory_budget` reserved for what passes after `recompute` and `stages` add
    beaten_s      seconds of a plan on another mesh: NoFasterPlan is raised where this one cannot be faster; None: none is known
    numbers       places of Python numbers that are inputs of the program
    owners        by key, the coordinate on the pipeline axis that another program of the same model has fixed
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
    clip_grad_value: float | None = None
    scales_loss: bool = False
    microbatches: int | None = 1
    options: Options = Options()
    inputs: str = "global"
    joined: JoinedInputs | None = None
    outputs: str = "plain"
    names: Mapping[str, Sequence[str | None]] | None = None
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    double: bool = False
    batch_mix: str = "refuse"
    fixed: Mapping[str, Sharding] = field(default_factory=dict)
    offloaded: frozenset[str] = frozenset()
    dynamic: DynamicDims = DynamicDims()
    owners: Mapping[str, int] = field(default_factory=dict)
    gather_once: bool = True
    backend: str = "eager"
    searched: NamedChoices | None = None
    must_pass: bool = False
    chunks: int | None = None
    spare: int = 0
    beaten_s: float | None = None
    numbers: tuple[ReadPlace, ...] = ()

    @property
    def count(self) -> int:
        """Number of microbatches, once that is decided."""
        return self.microbatches or 1

    def having(self, **changes: Any) -> Request:
        """With other fields; what is none of them is an option, by name."""
        own = {one.name: changes.pop(one.name) for one in fields(self) if one.name in changes}
        return replace(self, options=self.options.having(**changes), **own)


@dataclass(frozen=True)
class OpenedDims:
    """Input dims of size 1 that are traced with a symbolic size, so that they have factors, and the axes that are to split them."""

    dims: DynamicDims
    axes: frozenset[str]

    @property
    def values(self) -> dict[str, int]:
        """By symbol, the actual size that is put in at the end."""
        return {PREFIX + name: 1 for name in self.dims.ranges}
