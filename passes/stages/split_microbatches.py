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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.errors import CompileError
from meshc.ir import is_integer, record, set_record, spmd
from meshc.ir.functions import Function
from meshc.ir.graph import ancestors_of, call, descendants_of, output_of, placeholders
from meshc.ir.keys import is_a, key_of
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.sharding import Part, Sharding, local_size
from meshc.ir.spmd import MICROBATCH
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.splitter import Splitter
from meshc.program.accumulate import whole_of
from meshc.program.program import Instruction, Port, Stage


def split_microbatches(lowered: LoweredProgram) -> LoweredProgram:
    """The stages and their schedule; with one microbatch, the only stage and a schedule of one instruction."""
    (stage,) = lowered.stages.values()
    count = lowered.sizes.get(MICROBATCH, 1)
    if count == 1:
        return replace(lowered, schedule=(Instruction("run", stage.name),))
    graph = stage.graph
    keys = stage.keys()
    sums = [node for node in graph.nodes if node.target is spmd.all_reduce and list(node.args[1]) == [MICROBATCH]]
    rows = outputs_by_rows(lowered, stage)
    refuse_gathered_rows(graph, sums, lowered.sizes)
    if not sums and not rows:
        return _as_one(lowered, count)
    parts = [node.args[0] for node in sums]
    results = stage.results()
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
    early = [n for n in graph.nodes if n.op == "call_function" and n not in repeated]
    split = Splitter(graph, keys)
    late = {key: node for key, node in results.items() if key not in written}
    behind = [d for d in done if d not in among and d not in varies]
    wanted_late = [n for n in (*late.values(), *[x for d in behind for x in d.all_input_nodes]) if isinstance(n, Node)]
    _refuse_wanted_whole(wanted_late, varies.difference(sums, rows.values()))
    integers = {n for n in early if is_integer(n)}
    later = {*varies, *done, *learned, output_of(graph)}
    shared = [n for n in early if n not in integers and any(user in later for user in n.users)]
    given = {n: key_of("value", n.name) for n in shared}
    before = split.stage("before", {key: n for n, key in given.items()}, given={})
    taken = {total: key_of(REDUCTIONS[total.args[2]].part, part.name) for total, part in zip(sums, parts, strict=True)}
    leaving = dict(zip(taken.values(), parts, strict=True))
    leaving |= {key_of("rows", node.name): node for node in rows.values()}
    whole = {total: _whole(key) for total, key in taken.items()}
    whole |= {node: _whole(key_of("rows", node.name)) for node in rows.values()}
    first = {key: part for key, part in leaving.items() if whole_of(key) and any(whole[total] == _whole(key) for total in mixing)}
    apart = first if lowered.mesh.pipeline_axis is None else {}  # stages of a pipeline run forward separately anyway
    ahead = split.stage("first", apart, given=given)
    learnt = {total: whole[total] for total in mixing}
    each = split.stage("each", {k: v for k, v in leaving.items() if k not in apart} | written, given={**given, **learnt})
    after = split.stage("after", late, given={**given, **whole})
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
    for node in graph.nodes:
        if spmd.is_collective(node.target) and node not in sums and MICROBATCH in node.args[1]:
            _refuse_few_rows(node, sizes)
            raise _mixes(node)


def _refuse_few_rows(node: Node, sizes: Mapping[str, int]) -> None:
    """Raises CompileError if partial rows of all microbatches are reduce-scattered and a microbatch has fewer rows than ranks."""
    (operand,) = node.all_input_nodes
    sharding = record(operand).sharding
    if sharding is None:
        return
    ranks = prod(sizes[axis] for axis, _ in sharding.partial)
    for part in (part for dim in sharding.dims for part in dim if MICROBATCH in part.axes):
        if part.size < sizes[MICROBATCH] * ranks:
            count, axes = sizes[MICROBATCH], " and ".join(axis for axis, _ in sharding.partial)
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
    count = lowered.sizes[MICROBATCH]
    graph = after.graph
    for node, key in after.keys().items():
        if not is_a(key, "joined"):
            continue
        made = record(node)
        assert made.sharding is not None
        part = made.sharding.dims[0][0]
        axes = [axis for axis in part.axes if axis != MICROBATCH]
        set_record(node, replace(made, shape=(made.shape[0] * count, *made.shape[1:]), sharding=None))
        rows = _OutputRows(graph, node, partial(_rows, part, lowered.sizes))
        rows.cut_padding(axes)
        while axes and lowered.request.inputs != "local":
            rows.gather(axes.pop(), lowered.sizes)
            rows.cut_padding(axes)
        if rows.made:
            node.replace_all_uses_with(rows.last, delete_user_cb=rows.is_other)
    local = lowered.request.inputs == "local"
    return tuple(port if port.sharding is None else replace(port, sharding=_without(port.sharding, local)) for port in lowered.outputs)


def _rows(part: Part, sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    return local_size(replace(part, axes=tuple(axes)), sizes)


class _OutputRows:
    """Emits the rows of an output: gathered axis by axis, each time without the padding. `size(axes)`: rows of a tile split by `axes`."""

    def __init__(self, graph: Graph, node: Node, size: Callable[[Sequence[str]], int]) -> None:
        self.graph, self.last, self.size = graph, node, size
        self.place = placeholders(graph)[-1]
        self.made: list[Node] = []

    def cut_padding(self, axes: Sequence[str]) -> None:
        if record(self.last).shape[0] != self.size(axes):
            self._emit(self.size(axes), aten.slice.Tensor, 0, 0, self.size(axes))

    def gather(self, axis: str, sizes: Mapping[str, int]) -> None:
        self._emit(record(self.last).shape[0] * sizes[axis], spmd.all_gather, [axis], 0)

    def is_other(self, user: Node) -> bool:
        return user not in self.made

    def _emit(self, rows: int, target: Function, *args: Argument) -> None:
        like = record(self.last)
        with self.graph.inserting_after(self.place):
            made = replace(like, shape=(rows, *like.shape[1:]), reason="the rows of all microbatches")
            self.place = call(self.graph, made, target, self.last, *args)
        self.last = self.place
        self.made.append(self.place)


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
