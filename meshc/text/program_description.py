"""Serialization of a program as plain data, and back: texts of its stages, JSON for everything else.

    describe_program(..)    {"mesh": "dp=2", "inputs": [{"kind": "parameter", "name": "up.weight", "type": "f32[8]"}, ...], ...}
    texts(program)       {"main": "def main(...): ..."}
    read_description(..)  the program again: its text is the same, and nothing was executed

A saved program is this in files (`meshc.artifact`); ranks that take rank 0's program get it through the process group's store.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypedDict, cast, get_type_hints

from torch import Tensor

from meshc import ir
from meshc.errors import ArtifactError, ScheduleError
from meshc.ir import Record, bounds
from meshc.ir.keys import KINDS, PortKind
from meshc.ir.mesh import Mesh
from meshc.ir.sizes import parse as parse_size
from meshc.pipelining import pipeline_text
from meshc.plan.plan import Plan
from meshc.program.completeness import refuse_incomplete
from meshc.program.instance import relation
from meshc.program.program import Info, Instruction, PlainProgram, Port
from meshc.text.allowed_operators import name_of
from meshc.text.parse import parse_one_type, parse_sizes, parse_stage
from meshc.text.printer import SideTable, port_type, print_sizes, print_stage, side_table


class PortRow(TypedDict, total=False):
    kind: PortKind
    name: object
    type: str
    of: object
    requires_grad: bool


class ProgramDescription(TypedDict, total=False):
    """`program.json`. A description read from a file is unchecked: a field of another kind raises an error that `load` converts."""

    mesh: str
    plan: str
    mode: str
    backend: str
    microbatches: int
    axis_sizes: dict[str, int]
    inputs: list[PortRow]
    outputs: list[PortRow]
    stages: list[str]
    schedule: list[dict[str, object]]
    pipeline: pipeline_text.PipelineJson
    notes: list[str]
    sizes: str
    constraints: list[str]
    info: Info
    side_table: dict[str, SideTable]


def describe_program(program: PlainProgram) -> ProgramDescription:
    """The description of a program without its stages' texts and its constants. Entries of `program.info` that JSON cannot hold are
    omitted."""
    return {
        "mesh": str(program.mesh),
        "plan": str(program.plan),
        "mode": program.mode,
        "backend": program.backend,
        "microbatches": program.microbatches,
        "axis_sizes": program.axis_sizes,
        "inputs": [_port_row(port) for port in program.inputs],
        "outputs": [_port_row(port) for port in program.outputs],
        "stages": list(program.stages),
        "schedule": [_without_defaults(instruction) for instruction in program.schedule],
        **({"pipeline": pipeline_text.pipeline_to_json(program.pipeline)} if program.pipeline is not None else {}),
        "notes": list(program.notes),
        **({"sizes": print_sizes(program.dynamic), "constraints": list(program.constraints)} if program.dynamic else {}),
        "info": cast(Info, {name: value for name, value in program.info.items() if _is_json(value)}),
        "side_table": {name: side_table(stage) for name, stage in program.stages.items()},
    }


def texts(program: PlainProgram, *, comments: bool = True) -> dict[str, str]:
    """The stages' texts, by name. Raises ArtifactError for an operator off the allow-list."""
    for stage in program.stages.values():
        for node in ir.calls(stage.graph):
            name_of(node.target)
    return {name: print_stage(stage, program, comments=comments) for name, stage in program.stages.items()}


def read_description(
    told: ProgramDescription, text_of: Callable[[str], tuple[str, str]], constants: Callable[[], dict[str, Tensor]], where: str
) -> PlainProgram:
    """The program of a description. Only its grammar is checked yet; `meshc.check` does the rest.

    text_of    stage name -> (the stage's text, its name in messages)
    constants  returns the constant tensors; called once
    where      name of `told` in messages

    Raises ArtifactError; for a field of the wrong kind, any of Python's own errors.
    """
    stages = {}
    for name in told["stages"]:
        if name in stages:
            raise ArtifactError(f"{where} names the stage {bounds.brief_repr(name)} twice")
        text, file = text_of(name)
        stages[name] = parse_stage(text, told["side_table"].get(name), file)
        if stages[name].name != name:
            raise ArtifactError(f"{file} holds the stage {stages[name].name}, not {name}")
    dynamic = parse_sizes(told.get("sizes", ""))
    hints = {size.symbol: size.hint for size in dynamic}
    schedule = tuple(_instruction(row) for row in _rows(told["schedule"]))
    for instruction in schedule:
        if instruction.stage and instruction.stage not in stages:
            raise ArtifactError(f"{where}: the schedule runs {instruction.stage}, but the stages are {', '.join(stages)}")
    program = PlainProgram(
        stages,
        Mesh(told["mesh"]),
        Plan(told["plan"]),
        _ports(told["inputs"], hints),
        _ports(told["outputs"], hints),
        schedule,
        constants(),
        {str(axis): bounds.integer(size, f"the axis {axis}", 1, bounds.MOST_RANKS) for axis, size in told["axis_sizes"].items()},
        bounds.integer(told["microbatches"], "the number of microbatches", 1, bounds.MOST_RANKS),
        str(told["mode"]),
        list(map(str, told["notes"])),
        cast(Info, dict(told["info"])),
        dynamic,
        tuple(_constraint(text, hints) for text in told.get("constraints", [])),
        backend=str(told["backend"]),
    )
    if "pipeline" in told:
        try:
            program.pipeline = pipeline_text.pipeline_from_json(told["pipeline"])
            refuse_incomplete(program)
        except ScheduleError as error:
            raise ArtifactError(f"{where}, pipeline: {error}") from None
    return program


def _rows(told: list[dict[str, object]]) -> list[dict[str, object]]:
    if not isinstance(told, list) or len(told) > bounds.MOST_RUNS:
        raise ArtifactError(f"a schedule is a list of at most {bounds.MOST_RUNS} instructions; this has {len(told)}")
    return told


_KINDS: Final = {name: kind for name, kind in get_type_hints(Instruction).items() if name != "keys"}
"""Field of an instruction -> its type."""


def _instruction(row: Any) -> Instruction:
    one = Instruction(**{**row, "keys": tuple(row.get("keys", ()))})
    for name, kind in _KINDS.items():
        if type(getattr(one, name)) is not kind:
            raise ArtifactError(f"an instruction's {name} is {bounds.brief_repr(getattr(one, name))}, and must be of type {kind.__name__}")
    if not all(isinstance(key, str) for key in one.keys):
        raise ArtifactError("an instruction's keys are texts")
    return one


def _port_row(port: Port) -> PortRow:
    row: PortRow = {"kind": port.kind, "name": port.name, "type": port_type(port)}
    if port.of:
        row["of"] = port.of
    if port.requires_grad:
        row["requires_grad"] = True
    return row


def _constraint(text: str, hints: Mapping[str, int]) -> str:
    left, _, right = relation(text)
    parse_size(left, hints), parse_size(right, hints)
    return text


def _ports(rows: Sequence[PortRow], hints: Mapping[str, int]) -> tuple[Port, ...]:
    types: dict[str, Record] = {}
    found = {port.key: port for port in (_port(row, hints, types) for row in rows)}
    if len(found) != len(rows):
        raise ArtifactError("two ports that enter, or that leave, have one name")
    return tuple(found.values())


def _port(row: PortRow, hints: Mapping[str, int], types: dict[str, Record]) -> Port:
    """The port of a row. `types`: records of types parsed so far, by text."""
    record = types.get(row["type"]) or parse_one_type(row["type"], hints)
    types[row["type"]] = record
    if row["kind"] not in KINDS or record.dtype is None:
        raise ArtifactError(f"{row['kind']}:{row['name']} is no port: kinds are {', '.join(KINDS)}, and a port is a tensor")
    name, of = row["name"], row.get("of", "")
    if not isinstance(name, str) or not isinstance(of, str):
        raise ArtifactError(
            f"a port's name and what it is of are texts, not {bounds.brief_repr(name)} and {bounds.brief_repr(row.get('of'))}"
        )
    requires_grad = bool(row.get("requires_grad", False))
    return Port(row["kind"], name, record.shape, record.dtype, record.sharding, of, requires_grad, record.storage)


def _without_defaults(value: Instruction) -> dict[str, object]:
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    }


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
