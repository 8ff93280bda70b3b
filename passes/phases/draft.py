"""What passes hand to each other: a program under construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from meshc.frontend.capture import TorchGraph
from meshc.frontend.dynamic import DynamicDims
from meshc.frontend.output_tree import OutputTree
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Sharding
from meshc.ir.sizes import PREFIX, Dynamic, at
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.factors import Factors
from meshc.passes.phases.names import Names
from meshc.passes.schedules.kind import Lists
from meshc.pipelining.cut import Pipeline
from meshc.plan.plan import Plan
from meshc.program.parts import Parts
from meshc.program.program import Instruction, Port, Stage


@dataclass(frozen=True)
class Request:
    """What the user asked for, in one value.

    function      called as function(module, *args, **kwargs); its output is the program's
    train         the output is a loss: gradients, and the update if there is an optimizer, are part of the program
    microbatches  None: as many as are predicted to be fastest
    batch_mix     "mean_of_parts": with several microbatches, the step is the mean of what each gives alone
    fixed         storage of parameters that another program of the same model has settled
    dynamic       which dims of the inputs are left open
    schedule      of a pipeline: a name, each rank's list as text, or a function that makes these lists
    stages_per_rank  of a pipeline; None: as many as the schedule wants
    memory_budget  bytes that a rank of a pipeline may hold; None: of a GPU its memory, which bounds only what is not named
    gather_once   of a pipeline: whether parameters that are stored split may be gathered once a call, where that is expected to fit
    pp_splits     modules at which the second and further stages of a pipeline begin
    check_indices  labels and indices that their reader has no row for are refused
    backend       what will run the program
    owners        coordinate on the pipeline axis, by key, of what another program of the same model has settled
    """

    module: nn.Module
    function: Callable[..., Any]
    signature: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: Mesh
    plan: Any = "auto"
    grad: bool = False
    train: bool = False
    optimizer: OptimizerSpec | None = None
    clip_grad_norm: float | None = None
    microbatches: int | None = 1
    inputs: str = "global"
    outputs: str = "plain"
    names: Mapping[str, Sequence[str | None]] | None = None
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    double: bool = False
    batch_mix: str = "refuse"
    fixed: Mapping[str, Sharding] = field(default_factory=dict)
    dynamic: DynamicDims = DynamicDims()
    schedule: str | Lists | None = None
    stages_per_rank: int | None = None
    pp_splits: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    memory_budget: int | None = None
    gather_once: bool = True
    check_indices: bool = True
    backend: str = "eager"

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


@dataclass
class Draft:
    """Everything known so far; each pass fills in or replaces what it is named after.

    parts  set if the step is the mean of its microbatches: graphs before `microbatch` are then those of one of them
    opened  set if a batch of 1 is padded; until the end its size is open then
    kept_whole  why one is not, where an axis has nothing else to split
    """

    request: Request
    traced: TorchGraph | None = None
    graph: Graph | None = None
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: dict[Node, str] = field(default_factory=dict)
    factors: Factors | None = None
    names: Names | None = None
    plan: Plan | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    pins: dict[tuple[Node, int], dict[tuple[int, int], tuple[str, ...]]] = field(default_factory=dict)
    storage_pins: dict[str, dict[tuple[int, int], tuple[str, ...]]] = field(default_factory=dict)
    spread_pins: dict[int, tuple[str, ...]] = field(default_factory=dict)
    assignment: Assignment | None = None
    stages: dict[str, Stage] = field(default_factory=dict)
    backward: Stage | None = None  # as `cut` left it, for `specialise`; None where no output could do without its gradient
    schedule: tuple[Instruction, ...] = ()
    notes: list[str] = field(default_factory=list)
    output_tree: OutputTree | None = None
    cache_outputs: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    random_calls: int = 0
    dynamic: tuple[Dynamic, ...] = ()
    constraints: tuple[str, ...] = ()
    parts: Parts | None = None
    pipeline: Pipeline | None = None
    opened: Opened | None = None
    kept_whole: str = ""

    @property
    def mesh(self) -> Mesh:
        return self.request.mesh

    def again(self, request: Request, **changes: Any) -> Draft:
        """What `factorize` left, for the passes after it under another request: they make graphs of their own."""
        own: dict[str, Any] = dict(
            request=request, inputs=list(self.inputs), outputs=list(self.outputs), notes=list(self.notes), sizes=dict(self.sizes), pins={},
            storage_pins={}, spread_pins={}, seconds={},
        )  # fmt: skip
        return replace(self, **{**own, **changes})

    def real(self, size: Any) -> Any:
        """A size as it will be, where one that stands for it decides otherwise."""
        return size if self.opened is None else at(size, self.opened.values)

    def beside(self, request: Request) -> Draft:
        """What was traced, under a request with another optimizer, as a graph of its own: the passes up to `factorize` write into it."""
        assert replace(request, optimizer=None) == replace(self.request, optimizer=None)
        graph = Graph()
        graph.output(graph.graph_copy(self.the_graph(), {}))
        return self.again(request, graph=graph, constants=dict(self.constants), updates={}, seconds=dict(self.seconds))

    def the_graph(self) -> Graph:
        assert self.graph is not None
        return self.graph

    def placeholders(self) -> dict[str, Node]:
        """Placeholder of each input port, by key."""
        nodes = self.the_graph().find_nodes(op="placeholder")
        return {port.key: node for port, node in zip(self.inputs, nodes, strict=True)}

    def results(self) -> list[Node]:
        (output,) = self.the_graph().find_nodes(op="output")
        return list(output.args[0])
