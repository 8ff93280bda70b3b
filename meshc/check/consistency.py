"""Consistency of a program's text: signature, stages, keys and schedule against each other, before anything runs.

    ports      inputs and outputs have valid types in natural order; constants have the declared shapes and dtypes
    stages     each value has the shape and dtype that its operator returns (`stage.py`); regions can be compiled
    storage    memory that values share (`meshc/ir/sharing.py`): no read of an overwritten value, no result in memory kept between calls
    keys       a key has one type in the signature and in all stages that write or read it
    schedule   runs existing stages on existing values; collectives that start early start with complete sums (`starts.py`)

Whether values are sharded as their types say, and are what the model computes, is a proof's to say (`meshc/proof`).

Programs with dynamic sizes are checked at the hints and at both ends of the ranges. To run at other sizes, `check_program` is called on the
result of `instance.at`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest

from torch.fx import Graph, Node

from meshc import ir
from meshc.check import host_values, overwrites, phases, used_rows_readers
from meshc.check.info import faults_of_info
from meshc.check.stage import faults as faults_of_stage
from meshc.check.stage import may_view
from meshc.check.starts import faults_of_lists
from meshc.check.starts import faults_of_stages as faults_of_started
from meshc.check.types import Wrong, check_type
from meshc.errors import ArtifactError, ScheduleError
from meshc.ir import Record
from meshc.ir.mesh import axis_sizes
from meshc.ir.regions import blocks, microbatch_integers, region_of, why_alone
from meshc.ir.sharding import Sharding, is_padded, local_shape
from meshc.ir.sharing import KEPT, OVER_OPERAND, PARTS_INSIDE, sharing_of
from meshc.ir.spmd import MICROBATCH, joins_stages
from meshc.pipelining.pipeline_stages import slot
from meshc.program import instance
from meshc.program.accumulate import ACCUMULATES, WAYS, whole_of
from meshc.program.completeness import refuse_incomplete
from meshc.program.packing import escapes, may_hold_its_parts, may_overwrite, may_stay, writes_in_place
from meshc.program.program import BACKENDS, RUNS, PlainProgram, Port, Stage
from meshc.text.allowed_operators import spelling
from meshc.text.printer import print_type

SHOWN = 10
"""Most faults that one error lists."""


def check_program(program: PlainProgram, where: str) -> None:
    """Raises ArtifactError that lists faults of a program; `where` is the file of the program's signature and schedule."""
    found = list(islice(_all_faults(program, where), SHOWN + 1))
    if not found:
        return
    more = ["and more"] if len(found) > SHOWN else []
    advice = "  what to do: compile and save the program again, or put right what was edited"
    raise ArtifactError("\n".join([*found[:SHOWN], *more, advice]))


def _all_faults(program: PlainProgram, where: str) -> Iterator[str]:
    yield from _axes(program, where)
    if program.backend not in BACKENDS:
        yield f"{where}: the backend is {program.backend[:80]!r}; a program is for {' or '.join(BACKENDS)}"
    yield from (f"{where}, {fault}" for fault in faults_of_info(program.info, [axis.name for axis in program.mesh.axes if axis.size > 1]))
    sent = {key for keys in program.pipeline.messages.values() for key in keys} if program.pipeline is not None else frozenset()
    try:
        refuse_incomplete(program)
    except ScheduleError as error:
        yield f"{where}, pipeline: {error}"
        return
    for world in _worlds(program):
        found = False
        for fault in _faults(world, where):
            found = True
            yield fault
        for stage in () if found else world.stages.values():  # these checks assume lines with correct types
            for name, why in (*host_values.faults(stage), *storage_faults(stage), *used_rows_readers.faults(stage, sent)):
                found = True
                yield _fault_text(stage, name, why)
        if found:
            return


def _worlds(program: PlainProgram) -> Iterator[PlainProgram]:
    """The program at fixed sizes."""
    for sizes in instance.tried_sizes(program):
        yield instance.substitute_sizes(program, {size.symbol: sizes[size.name] for size in program.dynamic}) if sizes else program


def _faults(program: PlainProgram, where: str) -> Iterator[str]:
    sizes, sound = program.axis_sizes, True
    for stage in program.stages.values():
        wrong = dict(faults_of_stage(stage, sizes))
        sound = sound and not wrong
        wrong = wrong or dict((*overwrites.faults(stage, may_view), *phases.faults(stage)))
        yield from (_fault_text(stage, name, why) for name, why in wrong.items())
    for name, value, why in _faults_of_regions(program):
        yield _fault_text(program.stages[name], value, f"{value}: {why}")
    for name, value, why in (*faults_of_started(program), *_faults_of_joint_collectives(program)) if sound else ():
        yield _fault_text(program.stages[name], value, why)
    for port in (*program.inputs, *program.outputs):
        try:
            check_type(_local(port, sizes), sizes)
            _check_order(port)
        except (Wrong, KeyError) as wrong:
            yield f"{where}: {port.key}: {wrong}"
            return
    yield from _keys(program, where)
    yield from _constants(program, where)
    yield from _schedule(program, where)
    yield from (f"{where}: {why}" for why in faults_of_lists(program))


def _faults_of_joint_collectives(program: PlainProgram) -> Iterator[tuple[str, str, str]]:
    """(stage, value, message) where pipeline stages issue different collectives with each other, or in another order: ranks would
    deadlock."""
    for when in ("before_", "after_"):
        rows = [(name, list(filter(joins_stages, stage.graph.nodes))) for name, stage in program.stages.items() if name.startswith(when)]
        for name, row in rows[1:]:
            first, there = rows[0]
            odd = next(((a, b) for a, b in zip_longest(there, row) if a is None or b is None or _call_of_all(a) != _call_of_all(b)), None)
            if odd is not None:
                stage, node, other = (name, odd[1], first) if odd[1] is not None else (first, odd[0], name)
                yield stage, node.name, f"{node.name} = {spelling(node.target)}(...): {other} has no such collective in its place"


def _faults_of_regions(program: PlainProgram) -> Iterator[tuple[str, str, str]]:
    """(stage, value, message) for lines that cannot be compiled, regions that are not contiguous, regions for the backend eager.

    with region(1):
        r: "f32[8]" = all_reduce(x, ["dp"], "sum")      refused: a collective
    """
    for stage in program.stages.values():
        if program.backend != "eager":
            yield from ((stage.name, node.name, why) for node, why in _outside_of_regions(stage.graph))
        elif (inside := next((node for node in stage.graph.nodes if region_of(node) is not None), None)) is not None:
            why = f"it is in region {region_of(inside)}, but the program is for the backend eager, which compiles none"
            yield stage.name, inside.name, why


def _outside_of_regions(graph: Graph) -> Iterator[tuple[Node, str]]:
    varying, seen = microbatch_integers(graph), set()
    for number, nodes in blocks(node for node in graph.nodes if node.op == "call_function"):
        if number is not None and number in seen:
            yield nodes[0], f"it is in region {number}, which has ended above: the lines of a region stand together"
        seen.add(number)
        for node in nodes:
            why = why_alone(node, varying)
            if number is not None and why:
                yield node, f"it is in region {number}, and {why}: it runs by itself"
            if ir.is_getitem(node) and region_of(node.all_input_nodes[0]) != number:
                yield node, f"it takes apart what {node.all_input_nodes[0]} makes, and they are not in one region"


def _call_of_all(node: Node) -> object:
    """Target, arguments, shape and dtype of a collective, which must be equal on all its ranks."""
    record = ir.record(node)
    return node.target, node.args[1:], tuple(record.shape), record.dtype


def _fault_text(stage: Stage, name: str, why: str) -> str:
    return stage.origin.fault(name, why) if stage.origin is not None else f"stage {stage.name}: {why}"


def _axes(program: PlainProgram, where: str) -> Iterator[str]:
    sizes = axis_sizes(program.mesh)
    told = {axis: size for axis, size in program.axis_sizes.items() if axis != "mb"}
    if told != sizes:
        yield f"{where}: the axes are {told}, but the mesh is {program.mesh}"
    if program.axis_sizes.get("mb", program.microbatches) != program.microbatches or program.microbatches < 1:
        yield f"{where}: there are {program.microbatches} microbatches, but the axis mb has {program.axis_sizes.get('mb')}"
    for stage in program.stages.values():
        ranks = stage.origin.axis_sizes if stage.origin is not None else None
        if ranks is not None and dict(ranks) != program.axis_sizes:
            assert stage.origin is not None
            yield f"{stage.origin.file}, line 1: @ranks has {dict(ranks)}, but {where} has {program.axis_sizes}"


def _local(port: Port, sizes: Mapping[str, int]) -> Record:
    """The record of a port's value on one rank."""
    shape = port.shape if port.sharding is None else local_shape(port.sharding, sizes)
    return Record(shape, port.dtype, port.sharding, storage=port.storage)


def _check_order(port: Port) -> None:
    if port.sharding is not None and any(part.order for _, _, part in port.sharding.parts()):
        raise Wrong(f"it lies as {port.sharding}; what enters and leaves a program lies in natural order")


def _keys(program: PlainProgram, where: str) -> Iterator[str]:
    """A message for every write or read of a key with another type than its port, or its first writer, has."""
    known: dict[str, tuple[Record, str]] = {}
    made: dict[str, list[Record]] = defaultdict(list)
    ports = {port.key for port in program.inputs}
    said = partial(print_type, axis_sizes=program.axis_sizes)
    for port in (*program.inputs, *program.outputs):
        record = _local(port, program.axis_sizes)
        before = known.setdefault(port.key, (record, f"{where} says"))[0]
        if not _is_same_type(before, record):
            yield f"{where}: {port.key} enters as {said(before)} and leaves as {said(record)}"
    for stage in program.stages.values():
        for key, node in stage.results().items():
            if not isinstance(node, Node) or not ir.has_record(node) or isinstance(node.meta[ir.KEY], tuple):
                continue
            record, whole = ir.record(node), whole_of(key)
            gives = {key: f"it gives {key} as"}
            if whole is not None and whole[0] != WAYS["rows"][0]:
                gives[whole[1]] = f"a part of {whole[1]} is"
            for name, what in gives.items():
                made[name].append(record)
                told, who = known.setdefault(name, (record, f"{stage.name} gives"))
                if not _is_same_type(told, record):
                    yield _fault_text(stage, f"return {key}", f"{what} {said(record)}, but {who} {said(told)}")
    for stage in program.stages.values():
        for node, key in stage.keys().items():
            record = ir.record(node)
            if why := _padding_fault(program, record, key, made[key] if key not in ports else []):
                yield _fault_text(stage, node.name, f"the parameter {node.name}: {why}")
            if key not in known:
                continue  # a key that nothing writes: `_schedule` reports it if a run needs it
            told, who = known[key]
            if not _is_same_type(told, record):
                yield _fault_text(stage, node.name, f"it takes {key} as {said(record)}, but {who} {said(told)}")


def _padding_fault(program: PlainProgram, record: Record, key: str, made: Sequence[Record]) -> str:
    """A message if an input's type declares padding zero that not all of `made`, the records written under `key`, declare zero; or ""."""
    if record.sharding is None:
        return ""
    known = frozenset.intersection(*(one.sharding.zero if one.sharding is not None else frozenset() for one in made or [Record()]))
    for dim, place in sorted(record.sharding.zero - known):
        part = record.sharding.dims[dim][place]
        if program.axis_sizes.keys() >= {*part.axes} and is_padded(part, program.axis_sizes):
            return f"its type says that the padding of [{part}] is zero, which nothing says that gives {key}"
    return ""


def _is_same_type(one: Record, other: Record) -> bool:
    places = [(tuple(each.shape), each.dtype, each.storage, each.used) for each in (one, other)]
    return places[0] == places[1] and _is_same_sharding(one.sharding, other.sharding)


def _is_same_sharding(one: Sharding | None, other: Sharding | None) -> bool:
    if one is None or other is None:
        return True
    return one.dims == other.dims and _without_microbatches(one) == _without_microbatches(other)


def _without_microbatches(sharding: Sharding) -> dict[str, str]:
    return {axis: how for axis, how in sharding.partial if axis != MICROBATCH}


def _constants(program: PlainProgram, where: str) -> Iterator[str]:
    for port in program.inputs:
        if port.kind != "constant":
            continue
        found = program.constants.get(port.name)
        if found is None:
            yield f"{where}: there is no constant {port.name}; there are {', '.join(program.constants) or 'none'}"
        elif tuple(found.shape) != _local(port, program.axis_sizes).shape or found.dtype != port.dtype:
            wanted = f"the program takes {port.dtype} {list(port.shape)}"
            yield f"{where}: the constant {port.name} is {found.dtype} {list(found.shape)}, {wanted}"


def _schedule(program: PlainProgram, where: str) -> Iterator[str]:
    """A message for every fault of a schedule without pipeline stages; `refuse_incomplete` checks the lists of a pipeline."""
    if program.pipeline is not None:
        return
    there = {port.key for port in program.inputs}
    runs: Counter[tuple[str, int]] = Counter()
    for step in program.schedule:
        if step.op not in (*RUNS, "join", *ACCUMULATES):
            yield f"{where}: the schedule has the instruction {step.op!r}, which no program without pipeline stages has"
            return
        if not 0 <= step.microbatch < program.microbatches:
            yield f"{where}: the schedule names microbatch {step.microbatch}; there are {program.microbatches}, from 0 on"
        if step.op in RUNS:
            stage = program.stages.get(step.stage)
            if stage is None:
                yield f"{where}: the schedule {step.op}s {step.stage!r}, but the stages are {', '.join(program.stages)}"
                return
            missing = [key for key in stage.inputs if slot(key, step.microbatch) not in there]
            if missing:
                yield f"{where}: {step.stage} of microbatch {step.microbatch} needs {missing[0]}, which is not there"
            lost = [key for key in stage.outputs if whole_of(key) is not None and key in there]
            if lost:
                yield f"{where}: the schedule {step.op}s {step.stage} once more before {lost[0]} of its last run has been taken"
            there |= {slot(key, step.microbatch) for key in stage.outputs}
            runs[step.stage, step.microbatch] += 1
        else:
            if step.value not in there:
                yield f"{where}: the schedule takes {step.value} into {step.into}, and nothing has made it since it was last taken"
            elif (step.op, step.into) != whole_of(step.value):
                op, into = whole_of(step.value) or ("", "nothing")
                yield f"{where}: the schedule takes {step.value} into {step.into} by {step.op}; it goes into {into}{f' by {op}' * bool(op)}"
            there.discard(step.value)
            there.add(step.into)
    missing = [port.key for port in program.outputs if port.key not in there]
    if missing:
        yield f"{where}: nothing gives {missing[0]}"
    yield from (f"{where}: {why}" for why in _faults_of_parts(program, runs, there))


def _faults_of_parts(program: PlainProgram, runs: Mapping[tuple[str, int], int], there: Collection[str]) -> Iterator[str]:
    """A message for every sum to which the part of some microbatch is not added exactly once."""
    for name, stage in program.stages.items():
        parts = [key for key in stage.outputs if whole_of(key) is not None]
        odd = next((microbatch for microbatch in range(program.microbatches) if runs.get((name, microbatch), 0) != 1), None)
        if parts and odd is not None:
            yield f"the schedule runs {name} of microbatch {odd} {runs.get((name, odd), 0)} times; it gives parts of sums, of each one"
        yield from (f"the schedule leaves {key}, which nothing takes" for key in parts if key in there)


def storage_faults(stage: Stage) -> Iterator[tuple[str, str]]:
    """(value, message) for every value that may not share storage as its line says. Assumes lines with correct types.

    flat: "f32[68]; its parts inside" = aten.cat([a, b])        refused if a line reads g1, which a flattens: g1 is in flat's memory
    r: "f32[68]; over its operand" = all_reduce(flat, ...)      refused if another line reads flat
    """
    written = writes_in_place(stage)
    for node in stage.graph.nodes:
        for word in sharing_of(node):
            if not (word == OVER_OPERAND and node in written) and (why := _why_not(node, word)):
                yield node.name, f"{node.name}: {word}, but {why}"
                break


def _why_not(node: Node, word: str) -> str:
    if word == PARTS_INSIDE and not may_hold_its_parts(node):
        return "that is for a cat of vectors, each made by reshape(x, [-1]) of an x that an operator has made and nothing else reads"
    if word == OVER_OPERAND and not may_overwrite(node):
        what = "what an operator has just made, and what nothing else reads, whatever lies in its memory"
        return f"that is for an all-reduce of {what}; for an addition in no region to it; for an index_copy into an input that leaves so"
    if word == KEPT and escapes(node):
        return "it leaves the stage, or what lies in its memory does: the next call would write over a result"
    if word == KEPT and (region := region_of(node)) is not None:
        return f"it is in region {region}, whose memory is the compiler's"
    if word == KEPT and not may_stay(node):
        return "that is for a product that is only reduced in place, and for a cat that has its parts inside"
    if word == KEPT and may_hold_its_parts(node) and PARTS_INSIDE not in sharing_of(node):
        return "its parts are not inside: a cat makes fresh memory otherwise"
    return ""
