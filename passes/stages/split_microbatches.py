"""Microbatches: a step (gradient accumulation) or an inference as stages before, first, each and after, with a schedule.

    per-rank graph with the sequential axis mb          before:  values of no parameter and no microbatch (counts of labels)
                                               becomes  first:   sums over the whole batch that microbatches read, if there are any
                                                        each:    forward and backward of microbatch k; partial sums leave
                                                        after:   reductions of gradients, clipping, the update

A microbatch is a tile along `mb`, one more axis on the batch factor; reducing over `mb` is accumulation. An operator that needs the whole
batch in the middle of a microbatch (batch norm, contrast within the batch) is refused. A step that is the mean of its microbatches has no
such operator: its graph is one microbatch's, and only gradients and loss are reduced over `mb`. Each microbatch reads the buffers that the
previous one has written. Of an inference, each microbatch computes rows of the outputs, which are concatenated after the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.errors import CompileError
from meshc.ir import is_integer, record, spmd, update
from meshc.ir.functions import Function
from meshc.ir.graph import ancestors_of, call, descendants_of, output_of, placeholders
from meshc.ir.keys import is_a, key_of
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.sharding import Sharding, local_size
from meshc.ir.spmd import MICROBATCH
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.splitter import split_stage
from meshc.program.accumulate import whole_of
from meshc.program.program import Instruction, Port, Stage


def split_microbatches(lowered: LoweredProgram) -> LoweredProgram:
    """The stages and their schedule; with one microbatch, the only stage and a schedule of one instruction."""
    (stage,) = lowered.stages.values()
    count = lowered.sizes.get(MICROBATCH, 1)
    if count == 1:
        return replace(lowered, schedule=(Instruction("run", stage.name),))
    graph, keys, results = stage.graph, stage.keys(), stage.results()
    sums = [node for node in graph.nodes if node.target is spmd.all_reduce and list(node.args[1]) == [MICROBATCH]]
    rows = outputs_by_rows(lowered, stage)
    refuse_gathered_rows(graph, sums, lowered.sizes)
    if not sums and not rows:
        return _as_one(lowered, count)
    parts = [node.args[0] for node in sums]
    done = descendants_of(sums)
    written = {key: node for key, node in results.items() if is_a(key, "buffer") and node not in done} if lowered.parts is not None else {}
    """The buffers that each microbatch writes, where it is a step of its own. Buffers computed from the whole batch are written last."""
    own = [n for n in graph.nodes if n.target is spmd.coordinate and n.args[0] == MICROBATCH]
    own += [node for node, key in keys.items() if key in written]
    among = set(sums)
    varies = descendants_of(own, through=lambda node: node not in among).difference(sums)
    mixing = sums_before_microbatches(graph, varies, done, sums, lowered)
    learned = descendants_of(node for node, key in keys.items() if is_a(key, "parameter", "state"))
    repeated = {*varies, *done, *learned, *parts}
    late = {key: node for key, node in results.items() if key not in written}
    behind = [d for d in done if d not in among and d not in varies]
    _refuse_wanted_whole((*late.values(), *(x for d in behind for x in d.all_input_nodes)), varies.difference(sums, rows.values()))
    later = {*varies, *done, *learned, output_of(graph)}
    early = [n for n in graph.nodes if n.op == "call_function" and n not in repeated and not is_integer(n)]
    given = {n: key_of("value", n.name) for n in early if not later.isdisjoint(n.users)}
    before = split_stage("before", keys, {key: n for n, key in given.items()})
    taken = {total: key_of(REDUCTIONS[total.args[2]].part, total.args[0].name) for total in sums}
    taken |= {node: key_of("rows", node.name) for node in rows.values()}
    leaving = {key: node.args[0] if node in among else node for node, key in taken.items()}
    whole = {node: _whole(key) for node, key in taken.items()}
    learnt = {total: whole[total] for total in mixing}
    first = {key: part for key, part in leaving.items() if _whole(key) in learnt.values()}
    apart = first if lowered.mesh.pipeline_axis is None else {}  # stages of a pipeline run forward separately anyway
    ahead = split_stage("first", keys, apart, given)
    each = split_stage("each", keys, {k: v for k, v in leaving.items() if k not in apart} | written, {**given, **learnt})
    after = split_stage("after", keys, late, {**given, **whole})
    outputs = whole_rows(lowered, after)
    stages = {s.name: s for s in (before, ahead, each, after) if s.outputs}
    return replace(lowered, stages=stages, outputs=outputs, schedule=_schedule(stages, count))


def _schedule(stages: Mapping[str, Stage], count: int) -> tuple[Instruction, ...]:
    """The schedule: `before`, `first` for each microbatch, `each` for each microbatch, `after`; results of a microbatch are accumulated."""
    steps = [Instruction("run", "before")] if "before" in stages else []
    for stage in [stages[name] for name in ("first", "each") if name in stages]:
        for k in range(count):
            steps.append(Instruction("run", stage.name, k))
            steps += [Instruction(found[0], stage.name, k, key, found[1]) for key in stage.outputs if (found := whole_of(key))]
    steps += [Instruction("run", "after")] if "after" in stages else []
    return tuple(steps)


def _refuse_wanted_whole(wanted: Iterable[Node], parts: Collection[Node]) -> None:
    for node in wanted:
        if node in parts:
            raise CompileError(
                f"{node.name} at {record(node).source} differs between microbatches, but the whole batch is wanted of it\n"
                "  what to do: microbatches=1, or return only the loss"
            )


def _as_one(lowered: LoweredProgram, count: int) -> LoweredProgram:
    """The program with one microbatch, for later passes too, where no value has a batch to split; else it would run `count` times."""
    (stage,) = lowered.stages.values()
    note = f"microbatches={count}: no rank has a second row of the batch to take apart, so the step runs as one microbatch"
    one = lowered.with_request(replace(lowered.request, microbatches=1)).with_notes(note)
    return replace(one, schedule=(Instruction("run", stage.name),))


def _whole(key: str) -> str:
    found = whole_of(key)
    assert found is not None
    return found[1]


def refuse_gathered_rows(graph: Graph, sums: Collection[Node], sizes: Mapping[str, int]) -> None:
    """Raises CompileError for a collective over microbatches that is none of the `sums`. `sizes`: of the axes."""
    found = (node for node in graph.nodes if spmd.is_collective(node.target) and node not in sums and MICROBATCH in node.args[1])
    if (node := next(found, None)) is not None:
        _refuse_few_rows(node, sizes)
        raise _mixes(node)


def _refuse_few_rows(node: Node, sizes: Mapping[str, int]) -> None:
    """Raises CompileError if partial rows of all microbatches are reduce-scattered and a microbatch has fewer rows than ranks."""
    (operand,) = node.all_input_nodes
    sharding, count = record(operand).sharding, sizes[MICROBATCH]
    if sharding is None:
        return
    ranks = prod(sizes[axis] for axis, _ in sharding.partial)
    for _, _, part in sharding.parts():
        if MICROBATCH in part.axes and part.size < count * ranks:
            axes = " and ".join(axis for axis, _ in sharding.partial)
            raise CompileError(
                f"microbatches={count}: the {part.factor} has {part.size} rows, and each of {ranks} ranks along {axes} takes a row of "
                f"every microbatch, at {record(node).source}\n"
                f"  what to do: microbatches=1, or {count * ranks} rows"
            )


def sums_before_microbatches(
    graph: Graph, varies: Collection[Node], done: Collection[Node], sums: Sequence[Node], lowered: LoweredProgram
) -> list[Node]:
    """Those of `sums` that microbatches read. Raises CompileError if these cannot be computed before.

        chosen = mean(one_hot(choice)), likely = mean(p), loss = .. + sum(chosen * likely)        load-balancing loss of routed experts
        d p of a row = chosen / rows, where `chosen` counts the rows of later microbatches too

        first:  forward of microbatch k up to part:chosen                    all microbatches, before the first `each`
        each:   forward and backward of microbatch k, which reads sum:chosen

    Only the sums leave `first`, so a step needs no more memory with it; forward runs once more up to the sums. A pipeline has no `first`:
    forward halves compute the parts, and the schedule must run these for all microbatches before a backward half reads the sum
    (`whole_sums.py`). Sums that depend on other such sums would need forward once more for each (batch norm in a second layer), and are
    refused.

    varies  nodes that differ between microbatches, up to sums
    done    nodes that read a sum
    """
    clashing = [node for node in graph.nodes if node in varies and node in done]
    if not clashing:
        return []
    needed = ancestors_of(clashing)
    read = [total for total in sums if total in needed]
    made = ancestors_of(operand for total in read for operand in total.all_input_nodes)
    again = next((total for total in read if total in made), None)
    if again is not None or lowered.parts is not None:
        raise _mixes(again or clashing[0], read)
    return read


def _mixes(node: Node, sums: Sequence[Node] = ()) -> CompileError:
    cause = next((total for total in sums if node in descendants_of([total])), node)
    found = record(cause)
    return CompileError(
        f"{found.reason.split(' ')[0].rstrip(',') or cause.name} at {found.source} mixes the whole batch, so the batch cannot be cut into "
        "microbatches without changing the result.\n"
        '  what to do: TrainStep(..., batch_mix="mean_of_parts") if the step may be the mean of what each microbatch gives alone, '
        "microbatches=1, or a norm that does not mix the batch, such as group norm"
    )


aten = torch.ops.aten


def outputs_by_rows(lowered: LoweredProgram, stage: Stage) -> dict[str, Node]:
    """Outputs of which a microbatch computes some rows, `rows:y`, by key. Raises CompileError unless they are contiguous rows of dim 0."""
    nodes = stage.results()
    found = {}
    for port in lowered.outputs:
        place = _place(port.sharding)
        if place is None or port.sharding is None:
            continue
        dim, position = place
        part = port.sharding.dims[dim][position]
        stays = lowered.request.inputs == "local" and len(part.axes) > 1
        if position or dim or part.axes[-1] != MICROBATCH or (stays and part.size % prod(lowered.sizes[axis] for axis in part.axes)):
            raise CompileError(
                f"{port.name}: the rows of a microbatch do not lie together in this output, {part}\n"
                "  what to do: microbatches=1, or a batch that the ranks and the microbatches divide"
            )
        found[port.key] = nodes[port.key]
    return found


def whole_rows(lowered: LoweredProgram, after: Stage) -> tuple[Port, ...]:
    """Changes `after` so that placeholders with keys `joined:` have the rows of all microbatches, gathered over ranks and without padding.
    Returns the ports of the outputs."""
    local = lowered.request.inputs == "local"
    for node, key in after.keys().items():
        if is_a(key, "joined"):
            _join_rows(after.graph, node, lowered.sizes, local)
    return tuple(port if port.sharding is None else replace(port, sharding=_without(port.sharding, local)) for port in lowered.outputs)


def _join_rows(graph: Graph, node: Node, sizes: Mapping[str, int], local: bool) -> None:
    """The rows of one output: gathered axis by axis (with `local`, not at all), each time without the padding."""
    made, readers, last = record(node), list(node.users), node
    assert made.sharding is not None
    part = made.sharding.dims[0][0]
    axes = [axis for axis in part.axes if axis != MICROBATCH]
    update(node, shape=(made.shape[0] * sizes[MICROBATCH], *made.shape[1:]), sharding=None)

    def emit(rows: int, target: Function, *args: Argument) -> Node:
        like = record(last)
        return call(graph, replace(like, shape=(rows, *like.shape[1:]), reason="the rows of all microbatches"), target, last, *args)

    with graph.inserting_before(placeholders(graph)[-1].next):
        while True:
            rows = local_size(replace(part, axes=tuple(axes)), sizes)
            if record(last).shape[0] != rows:
                last = emit(rows, aten.slice.Tensor, 0, 0, rows)
            if local or not axes:
                break
            axis = axes.pop()
            last = emit(rows * sizes[axis], spmd.all_gather, [axis], 0)
    for reader in readers:
        reader.replace_input_with(node, last)


def _place(sharding: Sharding | None) -> tuple[int, int] | None:
    """Dim and position of the part that microbatches split; None if there is none."""
    parts = sharding.parts() if sharding is not None else ()
    return next(((dim, position) for dim, position, part in parts if MICROBATCH in part.axes), None)


def _without(sharding: Sharding, local: bool) -> Sharding:
    """The sharding in which an output leaves: whole, or with `local` this rank's part of the batch."""
    place = _place(sharding)
    if place is None:
        return sharding
    axes = sharding.dims[place[0]][place[1]].axes
    return sharding.with_axes(*place, tuple(axis for axis in axes if local and axis != MICROBATCH))
