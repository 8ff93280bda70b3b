"""Early reductions of gradient accumulation: they begin during the last microbatch's run, not after it.

    run(stage="each", microbatch=1)              run(stage="each", microbatch=1)
    add(.., into="sum:g0")                       add(.., into="sum:g0")
    add(.., into="sum:g1")                       add(.., into="sum:g1")
    run(stage="after")                 becomes   start(stage="start_r1", microbatch=1, keys=("sum:g1",), during="each")
                                                 start(stage="start_r0", microbatch=1, keys=("sum:g0",), during="each")
                                                 run(stage="after")
    def after(g0 = "sum:g0", g1 = "sum:g1"):     def start_r0(g0 = "sum:g0"):
        r0 = all_reduce(g0, ["dp"], "sum")           r0 = all_reduce(g0, ["dp"], "sum")
        r1 = all_reduce(g1, ["dp"], "sum")           return {"early:r0": r0}
                                                 def after(r0 = "early:r0", r1 = "early:r1"):

A collective of complete sums alone, if not between pipeline stages, becomes a stage of its own, with the nodes that prepare its operand. A
`start` stands behind the run that adds the last term to its sums, and means: within that run, as soon as the sums are complete. Starts of
one run are ordered as the run adds its terms (a term is added once computed, a collective's once it has been waited for). All ranks of a
group run one list, so they start the same collectives in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from meshc.ir import spmd
from meshc.ir.graph import add_placeholder, computable_from, copied_node
from meshc.ir.keys import key_of
from meshc.ir.regions import REGION, blocks, writes
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.splitter import split_stage
from meshc.pipelining.pipeline_stages import Start
from meshc.pipelining.schedule import Action
from meshc.program.accumulate import WAYS, is_added, whole_of
from meshc.program.program import Instruction, Stage
from meshc.program.rank_instructions import items_of, ranks_of, steps_of

BEHIND_A_RUN = frozenset(op for op, _ in WAYS.values())
"""Instructions that may stand between a run and its starts."""


def start_reductions_early(lowered: LoweredProgram) -> LoweredProgram:
    """Moves reductions that may start early out of the stage that each rank runs last."""
    starts: list[Start] = []
    stages, schedule = dict(lowered.stages), lowered.schedule
    for coordinates in ranks_of(lowered):
        steps = steps_of(lowered, coordinates)
        sums = whole_sums(stages, steps)
        late = steps[-1].stage if steps else ""
        found = reductions(stages[late], sums) if late in stages else []
        if not found:
            continue
        alone, rest = _extract_reductions(stages[late], found)
        stages = {one.name: one for stage in stages.values() for one in ([*alone, rest] if stage.name == late else [stage])}
        ordered = _starts_by_run(alone, stages, steps, sums)
        if lowered.pipeline is None:
            schedule = tuple(_with_starts(steps, ordered))
            continue
        items = items_of(lowered, coordinates)
        for position, of_run in ordered.items():
            action = items[position]
            assert isinstance(action, Action)
            starts += [Start(stage.name, stage.inputs, action) for stage in of_run]
    pipeline = None if lowered.pipeline is None else replace(lowered.pipeline, starts=tuple(starts))
    return replace(lowered, stages=stages, schedule=schedule, pipeline=pipeline)


def sums_of_late_stages(lowered: LoweredProgram) -> dict[str, dict[str, int]]:
    """Stages that ranks run last, by name, each with the sums that are complete by then (see `whole_sums`)."""
    lists = [steps_of(lowered, coordinates) for coordinates in ranks_of(lowered)]
    return {steps[-1].stage: whole_sums(lowered.stages, steps) for steps in lists if steps}


def whole_sums(stages: Mapping[str, Stage], steps: Sequence[Instruction]) -> dict[str, int]:
    """Sums that a rank's own runs accumulate, each with the position of the last run that adds to it."""
    found: dict[str, int] = {}
    others = {key for step in steps if step.op == "recv" for key in step.keys}
    for position, step in enumerate(steps):
        for key in stages[step.stage].outputs if step.op == "run" and step.stage in stages else ():
            whole = whole_of(key)
            if whole is not None and is_added(key) and whole[1] not in others:
                found[whole[1]] = position
    return found


def reductions(late: Stage, sums: Collection[str]) -> list[Node]:
    """The collectives whose operands depend on these sums alone."""
    whole = [node for node, key in late.keys().items() if key in sums]
    made = computable_from(late.graph, whole, through=lambda node: not spmd.is_collective(node.target))
    return [node for node in late.graph.nodes if node in made and spmd.is_collective(node.target) and not spmd.joins_stages(node)]


def _extract_reductions(late: Stage, found: Sequence[Node]) -> tuple[list[Stage], Stage]:
    """A stage for each of the collectives, and the rest of their stage, which takes their results as inputs."""
    rank = late.name.removeprefix("after").lstrip("_")
    names = {node: f"{rank}_{node.name}" if rank else node.name for node in found}
    early, keys = {node: key_of("early", name) for node, name in names.items()}, late.keys()
    alone = [split_stage(f"start_{name}", keys, {early[node]: node}) for node, name in names.items()]
    for node in (node for stage in alone for node in stage.graph.nodes):
        node.meta.pop(REGION, None)  # it runs beside another stage's regions, a line at a time
    return alone, _stage_without(late, {**keys, **early})


def _stage_without(late: Stage, given: Mapping[Node, str]) -> Stage:
    """The stage with the `given` nodes as inputs under these keys, without the nodes that only prepared them."""
    graph = Graph()
    env: dict[Node, Node] = {node: add_placeholder(graph, node) for node in given}
    for node in late.graph.nodes:
        if node not in env:
            env[node] = copied_node(graph, node, env.__getitem__)
    for node in reversed([env[node] for node in late.graph.nodes]):
        if not node.users and node.op != "output" and not spmd.is_collective(node.target) and not writes(node):
            graph.erase_node(node)
    left = set(graph.nodes)
    return replace(late, graph=graph, inputs=tuple(key for node, key in given.items() if env[node] in left))


def _starts_by_run(
    alone: Sequence[Stage], stages: Mapping[str, Stage], steps: Sequence[Instruction], sums: Mapping[str, int]
) -> dict[int, list[Stage]]:
    """Position of a run -> stages that start within it, in the order in which the last of their sums is complete."""
    by_run: dict[int, list[Stage]] = defaultdict(list)
    for stage in alone:
        by_run[max(sums[key] for key in stage.inputs)].append(stage)
    for position, mine in by_run.items():
        turn = {key: turn for turn, key in enumerate(accumulation_order(stages[steps[position].stage])) if sums.get(key) == position}
        mine.sort(key=lambda stage: max(turn.get(key, -1) for key in stage.inputs))
    return dict(sorted(by_run.items()))


def _with_starts(steps: Sequence[Instruction], ordered: Mapping[int, Sequence[Stage]]) -> Iterator[Instruction]:
    """The list, with the starts of each run behind its additions."""
    due: list[Instruction] = []
    for position, step in enumerate(steps):
        if step.op not in BEHIND_A_RUN:
            yield from due
            due = [Instruction("start", one.name, step.microbatch, keys=one.inputs, during=step.stage) for one in ordered.get(position, ())]
        yield step
    yield from due


def accumulation_order(stage: Stage) -> list[str]:
    """The sums that a run of a stage adds to, in order: a term is added once it is computed, a collective's once it has been waited for,
    where it is first read or at the end. A region is one call."""
    parts: dict[Node, list[str]] = defaultdict(list)
    for key, value in stage.results().items():
        whole = whole_of(key)
        if whole is not None and is_added(key):
            parts[value].append(whole[1])
    taken: list[Node] = []
    flying: set[Node] = set()
    for region, nodes in blocks(stage.graph.nodes):
        for together in [nodes] if region is not None else [[node] for node in nodes]:
            waited = dict.fromkeys(operand for node in together for operand in node.all_input_nodes if operand in flying)
            sent = {node for node in together if spmd.is_collective(node.target)}
            taken += [*waited, *(node for node in together if node not in sent)]
            flying = (flying - waited.keys()) | sent
    return list(dict.fromkeys(key for node in taken for key in parts[node]))
