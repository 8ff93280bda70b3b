"""Live values of a rank at its memory peak, and the live bytes at each node that it runs; by the walk of `peak_memory.py`.

    bytes |      ___            a value that is live at the peak: from the node that computes it to its last reader, in this run of its
          |   __/ ^ \\__         stage or in a later one
          |__/         \\___
           forward  backward
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from torch.fx import Node

from meshc import ir
from meshc.cost import peak_memory
from meshc.cost.peak_memory import Moment, RankBytes, WalkInputs
from meshc.ir import Record
from meshc.ir.keys import is_a
from meshc.ir.sharing import sharing_of
from meshc.pipelining.pipeline_stages import slot
from meshc.program.accumulate import WHOLES, whole_of
from meshc.program.program import RUNS, Instruction, PlainProgram, Stage
from meshc.program.rank_instructions import steps_of

GRADIENTS: Final = ("gradient", "sum")
"""Kinds of keys of parameters' gradients between stages."""
BESIDE: Final = "beside"
"""Key of memory that collectives in flight hold beside values: copies that they send, parts that they join."""


class ExecutedNode(NamedTuple):
    """A node of a stage, and the position of the instruction that runs it on its rank."""

    position: int
    stage: str
    node: Node

    @property
    def record(self) -> Record:
        """The node's record; of several results, the first's."""
        return ir.records(self.node)[0]


@dataclass(frozen=True)
class Value:
    """A value that is live at the peak.

    key       its key between stages; "" if only one run uses the value
    bytes     bytes on a rank
    record    its record; None if the program's text has none
    made      the node that computes the value; None if it is an input, or comes from another rank
    until     the node that reads the value last; None if it is live until the call ends
    gradient  whether it is a parameter's gradient, or a summand of one
    """

    key: str
    bytes: int
    record: Record | None
    made: ExecutedNode | None
    until: ExecutedNode | None
    gradient: bool = False


@dataclass(frozen=True)
class Liveness:
    """Live bytes over a call on the rank that needs most memory.

    holds   the rank's memory
    course  (live bytes of computed values, phase) at each node that the rank runs, in order
    peak    index of the peak in `course`
    values  values that are live at the peak, largest first
    """

    holds: RankBytes
    course: Sequence[tuple[int, str]]
    peak: int
    values: Sequence[Value]


def peak_liveness(program: PlainProgram, holds: RankBytes | None = None) -> Liveness:
    """The live bytes over a call, and the values at the peak. `holds`: the result of `peak_memory.peak_rank`, if it is known already."""
    holds = holds or peak_memory.peak_rank(program)
    coordinates = {} if program.pipeline is None else {program.pipeline.axis: holds.rank}
    course: list[tuple[int, str]] = []
    values: list[Value] = []
    inside: dict[int, list[tuple[int, str]]] = {}
    at, phase = 0, ir.PHASES[0]
    given = WalkInputs(program, sharing_of)
    for moment in peak_memory.moments(program, coordinates, given):
        waiting = sum(moment.waiting.values())
        if moment.left is None:
            added = [(moment.rows, phase)]
        else:
            waiting += sum(moment.read.values())
            added = inside.setdefault(id(moment.left), list(_bytes_and_phases(moment, phase)))
        if moment.position == holds.peak.step:
            here = max(range(len(added)), key=lambda index: added[index][0], default=0)
            at = len(course) + here
            values = sorted(_live_values(program, coordinates, given, moment, here), key=lambda one: -one.bytes)
        course += [(waiting + size, which) for size, which in added]
        phase = course[-1][1] if course else phase
    return Liveness(holds, course, at, values)


def _bytes_and_phases(moment: Moment, phase: str) -> Iterator[tuple[int, str]]:
    assert moment.walk is not None and moment.left is not None
    for node, (size, _, _) in zip(moment.walk.nodes, moment.walk.course(moment.left), strict=True):
        if node.op == "call_function" and ir.has_record(node):
            phase = ir.records(node)[0].phase
        yield size, phase


def _live_values(
    program: PlainProgram, coordinates: Mapping[str, int], given: WalkInputs, moment: Moment, here: int
) -> Iterator[Value]:  # fmt: skip
    """The values that are live at node `here` of the stage that one instruction runs."""
    between = _StageBoundaries(program, steps_of(program, coordinates), given, moment.position)
    for key, size in moment.waiting.items():
        if size:
            yield between.value(key, size)
    walk, left = moment.walk, moment.left
    if walk is None or left is None:
        if moment.rows:
            yield between.value(moment.step.into, moment.rows)
        return
    total, _, joins = next(islice(walk.course(left), here, None))
    leaving = {walk.home[value]: slot(key, moment.step.microbatch) for key, value in walk.ends}
    read_by = {walk.home[operand]: node for node in walk.nodes for operand in node.all_input_nodes}
    for values in walk.kept_together():  # their memory is allocated once for all runs
        held = [node for node in values if node not in left.size and walk.size.get(node)]
        if held:
            node = max(held, key=walk.size.__getitem__)
            total -= walk.size[node]
            yield _computed_value(moment, node, walk.size[node], None, node in left.grown)
    for node, size in left.size.items():
        comes = -1 if node.op == "placeholder" else walk.born[node] + (joins > 0)
        if not size or not comes <= here <= left.last[node]:
            continue
        total -= size
        until = ExecutedNode(moment.position, walk.stage.name, read_by[node]) if node in read_by else None
        if node.op == "placeholder":
            one = between.value(slot(walk.entering[node], moment.step.microbatch), size)
            yield Value(one.key, size, one.record, one.made, until, one.gradient)
        elif node in leaving:
            yield _computed_value(moment, node, size, between.last_reader(leaving[node]), node in left.grown, leaving[node])
        else:
            yield _computed_value(moment, node, size, until, node in left.grown)
    beside = total + sum(moment.read.values())
    if beside:
        yield Value(BESIDE, beside, None, None, None)


def _computed_value(moment: Moment, node: Node, size: int, until: ExecutedNode | None, gradient: bool, key: str = "") -> Value:
    assert moment.walk is not None
    at = ExecutedNode(moment.position, moment.walk.stage.name, node)
    return Value(key, size, at.record, at, until, gradient)


class _StageBoundaries:
    """Producers, up to instruction `now`, and last readers, from `now` on, of the values that wait between a rank's instructions."""

    def __init__(self, program: PlainProgram, steps: Sequence[Instruction], given: WalkInputs, now: int) -> None:
        self.program, self.given = program, given
        self._made: dict[str, tuple[int, Stage, Node]] = {}
        self._read: dict[str, tuple[int, Stage, Node]] = {}
        for position, step in enumerate(steps):
            stage = program.stages.get(step.stage)
            if step.op not in RUNS or stage is None:
                continue
            if position <= now:
                for key, node in stage.results().items():
                    if isinstance(node, Node) and ir.has_record(node):
                        whole = whole_of(key)
                        self._made[slot(key, step.microbatch) if whole is None else whole[1]] = position, stage, node
            if position >= now:
                self._read |= {slot(key, step.microbatch): (position, stage, node) for node, key in stage.keys().items() if node.users}

    def value(self, key: str, size: int) -> Value:
        made = self._maker(key)
        return Value(key, size, self._record(key) if made is None else made.record, made, self.last_reader(key), is_a(key, *GRADIENTS))

    def _maker(self, key: str) -> ExecutedNode | None:
        if key not in self._made:
            return None
        position, stage, node = self._made[key]
        home = node if is_a(key, *WHOLES) else self.given.walk(stage).home[node]  # a whole has memory apart from its parts
        return ExecutedNode(position, stage.name, home if ir.has_record(home) else node)

    def _record(self, key: str) -> Record | None:
        """The record of a value that another rank has sent, as the receiving stage has it."""
        _, _, node = self._read.get(key, (0, None, None))
        return ir.record(node) if node is not None and ir.is_tensor(node) else None

    def last_reader(self, key: str) -> ExecutedNode | None:
        if key not in self._read:
            return None
        position, stage, node = self._read[key]
        readers = [user for user in node.users if user.op != "output"]
        return ExecutedNode(position, stage.name, max(readers)) if readers else None
