"""Cut stages: a step, or an inference, over a pipeline axis: a graph for each half of each stage, and what they hand to each other.

    each:  forward and backward of microbatch k             forward_0: x -> flow:h        backward_0: flow:g, flow:.. -> part:g0
                                                   becomes  forward_1: flow:h -> part:loss  backward_1: flow:.. -> flow:g, part:g1
    after: norm, clipping, the update                        after_0: sum:g0 -> w0         after_1: sum:g1 -> w1

The cut is made in the per-rank graph, where it is settled what lies where: a rank sends to the rank of the next stage that has its other
coordinates. A parameter lives with the first stage that reads it. Another stage that reads it (a head tied to the embedding) gets it once
a call, before the first microbatch, and hands the sum of its gradients back after the last. Inputs and buffers are on every rank anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from meshc.accumulate import whole_of
from meshc.errors import PlanError
from meshc.ir import is_getitem, record, records, set_record
from meshc.passes.draft import Draft
from meshc.passes.microbatch import Splitter
from meshc.passes.stages.flows import flows, key_of
from meshc.passes.stages.gather_once import gather_once, gathers_once
from meshc.passes.stages.halves import WEIGHTS, split_backward
from meshc.passes.stages.homes import BACKWARD, FORWARD, Home, Kinds, kinds, numbers
from meshc.passes.stages.shape import Shape, shape_of
from meshc.passes.stages.updates import ALL, cut_updates, place
from meshc.pipelining.check import check
from meshc.pipelining.cut import Move, Pipeline
from meshc.pipelining.predict import costs_of
from meshc.pipelining.schedule import Link
from meshc.program import Stage

aten = torch.ops.aten


def cut_stages(draft: Draft) -> Draft:
    """Stages, messages and owners where the mesh has a pipeline axis; other programs are left alone."""
    axis = draft.mesh.pipeline_axis
    if axis is None:
        return draft
    if "each" not in draft.stages:
        draft.stages = without_update(draft.stages["main"])
    if gathers_once(draft):
        draft.stages = gather_once(draft.stages)
    each = draft.stages["each"]
    keys = dict(zip(each.graph.find_nodes(op="placeholder"), each.inputs, strict=True))
    found = kinds(each.graph, keys)
    known = numbers(each.graph, draft.the_graph())
    shape = shape_of(draft, found, known)
    Cutter(draft, axis.name, shape.ranks, found, shape.placed).run(shape)
    return draft


class Cutter:
    """`ranks`: of each stage."""

    def __init__(self, draft: Draft, axis: str, ranks: Sequence[int], found: Kinds, placed: Mapping[Node, Home]) -> None:
        self.draft, self.axis, self.ranks, self.found, self.placed = draft, axis, ranks, found, placed
        self.before, self.each, self.after = (draft.stages.get(name) for name in ("before", "each", "after"))
        self.behind = {} if self.before is None else read_for(self.before)

    def run(self, shape: Shape) -> None:
        each, after = self.each, self.after
        assert each is not None and after is not None
        (output,) = each.graph.find_nodes(op="output")
        parts: dict[str, tuple[Node, Home]] = {}
        apart: set[Node] = set()
        end = Home(len(self.ranks) - 1, FORWARD)
        for key, node in zip(each.outputs, output.args[0], strict=True):
            terms = _terms(node, self.placed) if key.startswith("part:") else [node]
            for term in terms:
                parts[f"part:{term.name}" if len(terms) > 1 else key] = (term, self.placed.get(term, end))
            if len(terms) > 1:
                _leave_out(node, terms, apart)
                after = _summed_apart(after, "sum:" + key.removeprefix("part:"), [f"sum:{term.name}" for term in terms])
        split = Splitter(each.graph, dict(zip(each.graph.find_nodes(op="placeholder"), each.inputs, strict=True)))
        ways = self._ways(shape, [node for node, _ in parts.values()])
        ways = {names: {node: home for node, home in placed.items() if node not in apart} for names, placed in ways.items()}
        crossings = {names: flows(self.found, placed, [(node, placed.get(node, home)) for node, home in parts.values()])
                     for names, placed in ways.items()}  # fmt: skip
        stages: list[Stage] = []
        for names, placed in ways.items():
            crossing = crossings[names]
            for half, name in names:
                for stage in range(len(self.ranks)):
                    if (name, stage) not in shape.graphs:
                        continue
                    home = Home(stage, half)
                    given = [one.gives[home] for one in crossings.values()] if half == FORWARD else [crossing.gives[home]]
                    results = {key_of(node): node for nodes in given for node in nodes}
                    results |= {key: node for key, (node, at) in parts.items() if placed.get(node, at) == home}
                    stages.append(split.stage(f"{name}_{stage}", results, {node: key_of(node) for node in crossing.reads[home]}))
        crossing = next(iter(crossings.values()))
        messages = {Link(half, a, b): tuple(map(key_of, nodes)) for (half, a, b), nodes in crossing.messages.items()
                    if self.ranks[a] != self.ranks[b]}  # fmt: skip
        owners = self._owners(stages)
        shared = self._shared(stages, owners)
        made = {whole[1]: self.ranks[home.stage] for key, (_, home) in parts.items() if (whole := whole_of(key))}
        made, returned = self._returned(after, made, owners)
        returned += self._written(stages, shape)
        entering = {**made, **{key: rank for key, rank in owners.items() if key in after.inputs}}
        kept = {key: rank for key, rank in owners.items() if key in after.outputs}
        updates = place(after, entering, {key.removeprefix("parameter:"): rank for key, rank in owners.items()}, self._labels())
        count = max(self.ranks) + 1
        late = cut_updates(after, updates, count, self.axis, kept)
        early = self._before([*stages, *late], count)
        self.draft.stages = {stage.name: stage for stage in (*early, *stages, *late)}
        self.draft.schedule = ()
        pipeline = Pipeline(self.axis, shape.schedule(messages), messages, owners, tuple(shared), tuple(returned))
        costs = costs_of(pipeline, self.draft.stages, self.draft.mesh)
        pipeline = replace(pipeline, schedule=shape.schedule(messages, costs))
        check(pipeline.schedule, messages, stages=len(self.ranks), microbatches=shape.microbatches, trains=shape.trains)
        self.draft.pipeline = pipeline

    def _ways(self, shape: Shape, parts: Sequence[Node]) -> dict[tuple[tuple[str, str], ...], Mapping[Node, Home]]:
        """Homes, with what the halves are called: backward whole, and in two where the schedule wants that. The first has forward."""
        found: dict[tuple[tuple[str, str], ...], Mapping[Node, Home]] = {}
        halved = {stage for name, stage in shape.graphs if name == "weight"}
        if not halved or any(name == "backward" for name, _ in shape.graphs):
            found[((FORWARD, "forward"), (BACKWARD, "backward"))] = self.placed
        if halved:
            names = ((BACKWARD, "input"), (WEIGHTS, "weight"))
            placed = split_backward(self.found, self.placed, parts, halved)
            found[names if found else ((FORWARD, "forward"), *names)] = placed
        return found

    def _owners(self, stages: Sequence[Stage]) -> dict[str, int]:
        """Rank by key. A parameter lives with the first stage that reads it forward, state and gradient with their parameter."""
        owners: dict[str, int] = {}
        forward_first = sorted(stages, key=lambda stage: not stage.name.startswith("forward"))
        names = [port.name for port in self.draft.inputs if port.kind == "parameter"]
        for name in names:
            key = f"parameter:{name}"
            first = next((stage for stage in forward_first if key in self._reads(stage)), None)
            here = 0 if first is None else self.ranks[int(first.name.rpartition("_")[2])]
            owners[key] = self.draft.request.owners.get(key, here)
        for port in (*self.draft.inputs, *self.draft.outputs):
            of = f"parameter:{port.of}"
            if port.kind in ("state", "gradient") and of in owners:
                owners[port.key] = owners[of]
        return owners

    def _shared(self, stages: Sequence[Stage], owners: Mapping[str, int]) -> list[Move]:
        wanted: dict[Move, None] = {}
        for stage in stages:
            rank = self.ranks[int(stage.name.rpartition("_")[2])]
            for key in self._reads(stage):
                if key in owners and owners[key] != rank:
                    wanted[Move(key, owners[key], rank)] = None
        return list(wanted)

    def _returned(self, after: Stage, made: Mapping[str, int], owners: Mapping[str, int]) -> tuple[dict[str, int], list[Move]]:
        """Where sums are when the update begins, and those that have to go there first: to the rank of the parameter that they are for,
        or to all if they are for parameters of several ranks."""
        settled = dict(made)
        moves = []
        labels = self._labels()
        (output,) = after.graph.find_nodes(op="output")
        leaving: dict[Node, set[str]] = defaultdict(set)
        for key, node in zip(after.outputs, output.args[0], strict=True):
            if key.startswith("gradient:"):
                leaving[node].add(key.removeprefix("gradient:"))
        params = {port.key: port.name for port in self.draft.inputs if port.kind == "parameter"}
        entering = list(zip(after.graph.find_nodes(op="placeholder"), after.inputs, strict=True))
        names = {node: params[key] for node, key in entering if key in params}
        for node, key in entering:
            if key in made:
                here = made[key]
                wanted = {owners.get(f"parameter:{name}", here) for name in _parameters_of(node, labels, leaving, names)} or {here}
                if len(wanted) > 1:
                    moves += [Move(key, here, rank) for rank in range(max(self.ranks) + 1) if rank != here]
                    settled[key] = ALL
                elif wanted != {here}:
                    (settled[key],) = wanted
                    moves.append(Move(key, here, settled[key]))
        return settled, moves

    def _written(self, stages: Sequence[Stage], shape: Shape) -> list[Move]:
        """Buffers that each microbatch writes, on the stage that does, are sent to all ranks in the end."""
        moves = []
        forwards = [item for items in shape.schedule(()).actions for item in items if item.op == "F"]
        for stage, key in [(one, key) for one in stages for key in one.outputs if key.startswith("buffer:")]:
            number = int(stage.name.rpartition("_")[2])
            others = [other.name for other in stages if other is not stage and key in other.inputs]
            order = [item.microbatch for item in forwards if item.stage == number]
            if others or order != sorted(order):
                why = f"{', '.join(others)} read it too" if others else "the schedule runs that stage's microbatches in another order"
                raise PlanError(
                    f"{key.removeprefix('buffer:')} is written by each microbatch for the next one, in {stage.name}, but {why}\n"
                    "  what to do: a mesh without pp, or pp_splits that keep what reads the buffer in one stage"
                )
            here = self.ranks[number]
            moves += [Move(key, here, rank) for rank in range(max(self.ranks) + 1) if rank != here]
        return moves

    def _labels(self) -> dict[str, str]:
        return {node.name: name for node, name in self.draft.updates.items()}

    def _reads(self, stage: Stage) -> list[str]:
        """What a stage reads, parameters that are gathered for it before the first microbatch included."""
        return [key for own in stage.inputs for key in (own, *self.behind.get(own, ()))]

    def _before(self, stages: Sequence[Stage], count: int) -> list[Stage]:
        """What each rank's stages need of what depends on no microbatch and on no parameter."""
        before = self.before
        if before is None:
            return []
        (output,) = before.graph.find_nodes(op="output")
        nodes = dict(zip(before.outputs, output.args[0], strict=True))
        split = Splitter(before.graph, dict(zip(before.graph.find_nodes(op="placeholder"), before.inputs, strict=True)))
        found = []
        for rank in range(count):
            mine = [stage for stage in stages if self._rank_of(stage) == rank]
            wanted = {key: nodes[key] for stage in mine for key in stage.inputs if key in nodes}
            if wanted:
                found.append(split.stage(f"before_{rank}", wanted, {}))
        return found

    def _rank_of(self, stage: Stage) -> int:
        kind, _, number = stage.name.rpartition("_")
        return int(number) if kind in ("before", "after") else self.ranks[int(number)]


def read_for(stage: Stage) -> dict[str, list[str]]:
    """For each value that a stage gives, the keys of what it is made of."""
    keys = dict(zip(stage.graph.find_nodes(op="placeholder"), stage.inputs, strict=True))
    behind: dict[Node, dict[str, None]] = {}
    for node in stage.graph.nodes:
        behind[node] = {keys[node]: None} if node in keys else {key: None for x in node.all_input_nodes for key in behind[x]}
    (output,) = stage.graph.find_nodes(op="output")
    return {key: list(behind[node]) for key, node in zip(stage.outputs, output.args[0], strict=True)}


def without_update(stage: Stage) -> dict[str, Stage]:
    """A step of one microbatch as `each`, up to the gradients, and `after`; likewise an inference, whose `after` is its outputs."""
    graph = stage.graph
    keys = dict(zip(graph.find_nodes(op="placeholder"), stage.inputs, strict=True))
    found = kinds(graph, keys)
    late: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (records(node)[0].phase == "update" or any(x in late for x in node.all_input_nodes)):
            late.add(node)
    early = {*found.forward, *found.backward} - late
    (output,) = graph.find_nodes(op="output")
    parts = dict.fromkeys(x for node in (*late, output) for x in node.all_input_nodes if x in early)
    order = [node for node in graph.nodes if node in parts]
    split = Splitter(graph, keys)
    each = split.stage("each", {f"part:{node.name}": node for node in order}, {})
    results = dict(zip(stage.outputs, output.args[0], strict=True))
    return {"each": each, "after": split.stage("after", results, {node: f"sum:{node.name}" for node in order})}


def _terms(node: Node, placed: Mapping[Node, Home]) -> list[Node]:
    """A partial sum as what different stages add to it: gradients of a tied parameter travel once, not with every microbatch."""
    if node.target is not aten.add.Tensor or node.kwargs or len({placed[x] for x in node.all_input_nodes if x in placed}) < 2:
        return [node]
    if not all(isinstance(operand, Node) and record(operand).shape == record(node).shape for operand in node.args):
        return [node]
    return [term for operand in node.args for term in _terms(operand, placed)]  # type: ignore[arg-type]


def _leave_out(node: Node, terms: Sequence[Node], apart: set[Node]) -> None:
    """Notes the additions of terms that are now added up after the last microbatch: no stage makes them, unless it reads them."""
    if node not in terms and all(user.op == "output" or user in apart for user in node.users):
        apart.add(node)
        for operand in node.all_input_nodes:
            _leave_out(operand, terms, apart)


def _summed_apart(after: Stage, key: str, terms: Sequence[str]) -> Stage:
    """`after` with a sum in several parts, which it adds up."""
    graph = after.graph
    placeholders = graph.find_nodes(op="placeholder")
    place = after.inputs.index(key)
    old = placeholders[place]
    with graph.inserting_before(old):
        made = [graph.placeholder(term.replace(":", "_").replace(".", "_")) for term in terms]
    for node in made:
        set_record(node, record(old))
    total = made[0]
    with graph.inserting_after(placeholders[-1]):
        last = placeholders[-1]
    for term in made[1:]:
        with graph.inserting_after(last if last is not old else made[-1]):
            total = last = graph.call_function(aten.add.Tensor, (total, term))
        set_record(total, replace(record(old), reason="gradients of several stages"))
    old.replace_all_uses_with(total)
    graph.erase_node(old)
    graph.lint()
    return Stage(after.name, graph, (*after.inputs[:place], *terms, *after.inputs[place + 1 :]), after.outputs)


def _parameters_of(node: Node, labels: Mapping[str, str], leaving: Mapping[Node, set[str]], names: Mapping[Node, str]) -> set[str]:
    """The parameters that a sum is the gradient of: those of the updates that read it, or of what is said to belong to one.

    leaving  what leaves as gradients -> their parameters
    names    placeholder -> parameter
    """
    found: set[str] = set()
    work, seen = [node], {node}
    while work:
        one = work.pop()
        found |= leaving.get(one, set())
        for user in one.users:
            if user.op != "call_function" or user in seen:
                continue
            seen.add(user)
            label = None if is_getitem(user) else labels.get(records(user)[0].of.partition(".")[0])
            mine = {names[operand] for operand in user.all_input_nodes if operand in names} | ({label} if label is not None else set())
            found |= mine
            if not mine:
                work.append(user)
    return found
