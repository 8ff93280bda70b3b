"""The compiled program as plain data: stages (graphs), the schedule that runs them, and the ports of inputs and outputs.

Before `partition` there is one global-view stage; after it each stage is the code that every rank runs. A rank's mesh coordinates are its
only input that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias, TypedDict

import torch
from torch.fx import Graph, Node

from meshc.ir.graph import placeholders, results_of
from meshc.ir.keys import PortKind, key_of
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Sharding
from meshc.ir.sizes import Dynamic
from meshc.ir.storage_moves import Storage
from meshc.pipelining.pipeline_stages import Pipeline
from meshc.plan.plan import Plan

BACKENDS = ("eager", "inductor")
"""What runs a stage: its operators one by one, or regions of them that Inductor compiles."""


@dataclass(frozen=True)
class Port:
    """One named value that enters or leaves a program.

    kind      a parameter, buffer or state that enters and leaves under one name is updated in place
    name      `model.layers.0.mlp.up_proj.weight`; inputs and outputs have their path (`input_ids`, `logits`, `past_key_values.0.0`)
    shape     global
    sharding  at entry and exit (storage)
    of        state, gradient: the parameter's name; tangent: the output's; number: `group.entry`, or its name in Python
    storage   where it is stored between calls, and within a call where nothing reads it
    """

    kind: PortKind
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Sharding | None = None
    of: str = ""
    requires_grad: bool = False
    storage: Storage = "device"

    @cached_property
    def key(self) -> str:
        """Unique within the program: values of one kind have distinct names."""
        return key_of(self.kind, self.name)


@dataclass(frozen=True)
class Origin:
    """The text that a stage was read from.

    file        as messages name it
    lines       the text
    at          value -> the number of its line
    axis_sizes  those of its @ranks line, if it has one
    """

    file: str
    lines: tuple[str, ...]
    at: Mapping[str, int]
    axis_sizes: Mapping[str, int] | None = None

    def fault(self, name: str, why: str) -> str:
        """A message about the value of this name: file and line, what is wrong, and the line itself."""
        number = self.at.get(name, len(self.lines))
        shown = self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""
        return f"{self.file}, line {number}: {why}\n    {shown[:200]}"


@dataclass(frozen=True)
class Stage:
    """A graph and the keys (of ports, or of values passed between stages) of its placeholders and outputs, in order.

    origin  the text that the stage was parsed from, if any: such a stage is untrusted, and the runtime checks its values
    """

    name: str
    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def keys(self) -> dict[Node, str]:
        """Placeholder -> key of its value."""
        return dict(zip(placeholders(self.graph), self.inputs, strict=True))

    def results(self) -> dict[str, Node]:
        """Key -> result node of the stage."""
        return dict(zip(self.outputs, results_of(self.graph), strict=True))


class TracedGraph:
    """The model's operators before they were placed on ranks, as a stage whose keys are the program's. Read when it is asked for."""

    def __init__(self, read: Callable[[], Stage]) -> None:
        self._read = read

    @cached_property
    def stage(self) -> Stage:
        """Raises ArtifactError for a text that is none."""
        return self._read()


@dataclass(frozen=True)
class Instruction:
    """One step of a rank's schedule.

    run     run `stage`; `microbatch` is its index where the stage has one
    add     add the stage output `value` into the accumulator `into`; max and min likewise
    join    the stage output `value` is rows of `into`, which is complete once every microbatch has added its own
    start   start the collective of `stage` as soon as the sums `keys` that it reads are complete, which they are within the run of the
            stage `during` of `microbatch`; this comes after that run's adds. Collectives of one run start in the order given here; each is
            waited for when its result is read
    send    post the values `keys` (of `microbatch`, which `stage` has made) to the rank at coordinate `peer` of the pipeline axis
    recv    post a receive of `keys` from there; the first instruction that reads one waits for it
    """

    op: str
    stage: str = ""
    microbatch: int = 0
    value: str = ""
    into: str = ""
    keys: tuple[str, ...] = ()
    peer: int = 0
    during: str = ""

    def reads(self, stages: Mapping[str, Stage]) -> tuple[str, ...]:
        """Keys of the values that the instruction's stage reads, or that are sent; none for add and join, part of the run before."""
        return stages[self.stage].inputs if self.op in RUNS else self.keys if self.op == "send" else ()


RUNS: Final = ("run", "start")
"""The instructions that run a stage."""


WorkRow: TypeAlias = list[str | float | dict[str, str]]


class Info(TypedDict, total=False):
    """Data of a saved program beside its text; checked when it is loaded (`meshc.check.info`).

    fresh    what each fresh state is filled with; None: a copy of the parameter
    numbers  the optimizer's, as `0.lr`
    guards   outcomes of its branches on them that are compiled in: group, number, relation, what it is compared with
    optimizer_state, master_weights, keep_gradients, accumulate    as in `meshc.Options`
    experts  the options of experts, by field
    sparse   n, m and the dim of groups, by parameter under a sparse line
    work     rows of a module, an operator, a phase, its arithmetic, and the share of each axis (`meshc.cost.divided_work`)
    """

    seed: int
    numbers: dict[str, float]
    guards: list[tuple[int, str, str, float]]
    fresh: dict[str, float | None]
    inputs: str
    outputs: str
    output_paths: list[str]
    random_calls: int
    work: list[WorkRow]
    batch_mix: str
    schedule: str | None
    stages_per_rank: int
    pp_splits: list[str] | None
    optimizer_state: str | None
    master_weights: bool
    keep_gradients: bool
    accumulate: bool
    experts: dict[str, float | str]
    sparse: dict[str, list[int]]


@dataclass
class PlainProgram:
    """A compiled (or half-compiled) program. Plain data: nothing in it needs a process group or the model.

    dynamic      symbolic sizes with their ranges; `meshc.program.instance.at` substitutes numbers
    constraints  further conditions on these sizes: `n_seq % 4 == 0`
    pipeline     on a mesh with an axis of pipeline stages: each rank's list, in place of `schedule`
    backend      one of BACKENDS: the only one that can run the stages
    traced       what it was made of, of a program from an artifact or for one
    """

    stages: dict[str, Stage]
    mesh: Mesh
    plan: Plan
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    schedule: tuple[Instruction, ...] = ()
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    axis_sizes: dict[str, int] = field(default_factory=dict)
    microbatches: int = 1
    mode: str = "forward"
    notes: list[str] = field(default_factory=list)
    info: Info = field(default_factory=Info)
    dynamic: tuple[Dynamic, ...] = ()
    constraints: tuple[str, ...] = ()
    pipeline: Pipeline | None = None
    backend: str = "eager"
    traced: TracedGraph | None = field(default=None, compare=False, repr=False)

    def port(self, key: str) -> Port:
        for port in (*self.inputs, *self.outputs):
            if port.key == key:
                return port
        raise KeyError(key)

    def owns(self, key: str, coordinates: Mapping[str, int]) -> bool:
        """Whether the rank at these coordinates has a port's value: with pipeline stages not every rank has every parameter."""
        return self.pipeline is None or self.pipeline.owners.get(key, at := coordinates[self.pipeline.axis]) == at

    @property
    def stage(self) -> Stage:
        """The only stage of a program that has not been cut."""
        (stage,) = self.stages.values()
        return stage


def sizes(program: PlainProgram) -> Mapping[str, int]:
    """Sizes of all axes a sharding of this program may name, the microbatch axis `mb` included."""
    return program.axis_sizes or axis_sizes(program.mesh)
