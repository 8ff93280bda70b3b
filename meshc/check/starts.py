"""Faults of collectives that start while microbatches run: stages that cannot be started, and starts at wrong positions.

    start(stage="start_r", microbatch=3, keys=("sum:g",), during="each")     start_r reads sum:g, complete within each of microbatch 3
    run(stage="after")                                                       reads early:r, the collective's result

A started stage is one collective of complete sums, with the operators that prepare it, and overwrites nothing. All ranks of a group run one
list, and so start collectives in the same order; pipeline stages run different lists, and no collective between them may be started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.fx import Node

from meshc.ir.graph import output_of
from meshc.ir.keys import is_a
from meshc.ir.regions import region_of, writes
from meshc.ir.spmd import MICROBATCH, is_collective, joins_stages
from meshc.program.accumulate import ADDED, WAYS
from meshc.program.program import RUNS, Instruction, PlainProgram, Stage
from meshc.program.rank_instructions import ranks_of, steps_of

BEHIND_A_RUN = frozenset(op for op, _ in WAYS.values())


def faults_of_stages(program: PlainProgram) -> Iterator[tuple[str, str, str]]:
    """(stage, value, message) for every line that a started stage may not have, and for every `early` key that another stage returns."""
    started, run = (
        {step.stage for coordinates in ranks_of(program) for step in steps_of(program, coordinates) if step.op == op} for op in RUNS[::-1]
    )
    for name, stage in program.stages.items():
        if name in started:
            yield from ((name, value, why) for value, why in _wrong(stage))
        if name in run or name not in started:
            for key in stage.outputs:
                if is_a(key, "early"):
                    yield name, f"return {key}", f"{key} is on its way: only a stage that is started, and not run, gives such a value"


def _wrong(stage: Stage) -> Iterator[tuple[str, str]]:
    keys = stage.keys()
    collectives = [node for node in stage.graph.nodes if is_collective(node.target)]
    for node in stage.graph.nodes:
        if why := _why_not(node, keys, collectives):
            yield node.name, f"{node.name}: {stage.name} is started, {why}"
    given = list(zip(stage.outputs, output_of(stage.graph).args[0], strict=True))  # type: ignore[arg-type]
    if len(collectives) == 1 and (len(given) != 1 or given[0][1] is not collectives[0] or not is_a(given[0][0], "early")):
        key = f"return {given[0][0]}" if given else ""
        yield key, f"{stage.name} is started: it gives {collectives[0].name} under a key that begins with early: and nothing else"
    if not collectives:
        yield "", f"{stage.name} is started, and has no collective"


def _why_not(node: Node, keys: Mapping[Node, str], collectives: Sequence[Node]) -> str:
    if node.op == "placeholder":
        return "" if is_a(keys[node], *ADDED) else f"and reads sums alone; {keys[node]} is none"
    if node.op != "call_function":
        return ""
    if not node.all_input_nodes:
        return "and is made of sums alone; this is made of none"
    if region_of(node) is not None:
        return "and runs beside regions of another stage: it stands in none itself"
    if writes(node):
        return "and changes nothing; this writes into its operands"
    if node in collectives and (joins_stages(node) or node.args[1] == [MICROBATCH]):
        return "and ranks of several pipeline stages, or several microbatches, start nothing together: their lists differ"
    if node in collectives[1:]:
        return f"and is one collective with what prepares it; {collectives[0].name} stands above"
    return ""


def faults_of_lists(program: PlainProgram) -> Iterator[str]:
    """A message for every start at a wrong position in the list of a rank."""
    for coordinates in ranks_of(program):
        rank = "".join(f"rank {place} of {axis}: " for axis, place in coordinates.items())
        yield from (rank + why for why in _faults_of_positions(steps_of(program, coordinates), program.stages))


def _faults_of_positions(steps: Sequence[Instruction], stages: Mapping[str, Stage]) -> Iterator[str]:
    come = {key: step.peer for step in steps if step.op == "recv" for key in step.keys}
    last_added = {step.into: position for position, step in enumerate(steps) if step.op in BEHIND_A_RUN}
    began: set[str] = set()
    run: Instruction | None = None  # the last run, if only its additions and starts are between it and `step`
    grown: set[str] = set()  # sums that this run has added to
    for position, step in enumerate(steps):
        if step.op in ("send", "recv") and (early := next((key for key in step.keys if is_a(key, "early")), None)):
            yield f"{early} is on its way and goes to no other rank"
        if step.op == "run":
            run, grown = step, set()
        elif step.op in BEHIND_A_RUN:
            grown.add(step.into)
        elif step.op != "start":
            run = None
        else:
            yield from _faults_of_timing(step, stages.get(step.stage), run, grown)
            if step.stage in began:
                yield f"{step.stage} starts twice"
            began.add(step.stage)
            for key in step.keys:
                if key in come:
                    yield f"{step.stage} waits for {key}, which comes from rank {come[key]}: nobody here knows when it is whole"
                elif key not in last_added:
                    yield f"{step.stage} waits for {key}, to which nothing is added"
                elif last_added[key] > position:
                    late = steps[last_added[key]]
                    yield f"{step.stage} starts with {key}, to which {late.stage} of microbatch {late.microbatch} adds afterwards"


def _faults_of_timing(step: Instruction, stage: Stage | None, run: Instruction | None, grown: set[str]) -> Iterator[str]:
    if stage is not None and step.keys != stage.inputs:
        yield f"{step.stage} waits for {', '.join(step.keys) or 'nothing'}, and reads {', '.join(stage.inputs) or 'nothing'}"
    if run is None or (run.stage, run.microbatch) != (step.during, step.microbatch):
        said = f"{step.during} of microbatch {step.microbatch}"
        yield f"{step.stage} starts within {said}: it stands behind that run, what that adds, and what else starts within it"
    elif not grown.intersection(step.keys):
        yield f"{step.stage} starts within {step.during} of microbatch {step.microbatch}, which adds to none of its sums"
