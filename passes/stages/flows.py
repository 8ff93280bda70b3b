"""Values that the stages of a microbatch send each other, and those that a forward half saves for its backward half.

    stage 0, F:  h = mlp(x)                    flow:h goes to stage 1, and stays for stage 0's own backward
    stage 1, F:  y = mlp(h)                    flow:y stays
    stage 1, B:  g = mlp_backward(.., h, y)    flow:g goes to stage 0

A value goes from the stage that computes it straight to every stage that reads it, however far: residuals, encoder outputs, long skips.
Values of the call's inputs alone are recomputed where they are read, unless a message is cheaper (`forwarded_values.py`), or the value is
worth its memory: then a stage that has computed it forward keeps it for backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from meshc.errors import PlanError
from meshc.ir import is_tensor, record, spmd
from meshc.ir.graph import ancestors_of
from meshc.ir.keys import key_of
from meshc.ir.used_rows_dims import dim_of
from meshc.passes.stages.stage_assignment import BACKWARD, FORWARD, Half, Kinds
from meshc.pipelining.schedule import Action, StageLink


@dataclass
class Flows:
    """For each half of each stage: nodes of other halves that it reads, and nodes that it passes on.

    messages   (op, from stage, to stage) -> values
    """

    reads: dict[Half, dict[Node, None]] = field(default_factory=lambda: defaultdict(dict))
    gives: dict[Half, dict[Node, None]] = field(default_factory=lambda: defaultdict(dict))
    messages: dict[tuple[str, int, int], dict[Node, None]] = field(default_factory=lambda: defaultdict(dict))


def flow_of(node: Node) -> str:
    """Key of a value of one microbatch that passes between halves."""
    return key_of("flow", node.name)


def flows(found: Kinds, placed: Mapping[Node, Half], results: Iterable[tuple[Node, Half]]) -> Flows:
    """The flows between halves. `results`: values computed in any case, each with its half."""
    made = Flows()
    work: dict[Half, list[Node]] = defaultdict(list)
    for node, half in (*placed.items(), *results):
        work[half].append(node)
    forward = {half.stage: _closure(nodes, half, placed) for half, nodes in work.items() if half.op == FORWARD}
    for half in sorted(work, key=lambda half: (half.op != FORWARD, half.stage)):
        own = forward[half.stage] if half.op == FORWARD else _closure(work[half], half, placed)
        for node in own:
            source = placed.get(node)
            if source is None:
                if half.op != FORWARD and node in found.given and worth_keeping(node) and node in forward.get(half.stage, ()):
                    made.reads[half][node] = made.gives[Half(half.stage, FORWARD)][node] = None
            elif source != half:
                made.reads[half][node] = None
                _carry(made, node, source, half)
    return made


def _closure(nodes: Iterable[Node], half: Half, placed: Mapping[Node, Half]) -> dict[Node, None]:
    """These nodes and all that they depend on, up to and including values of other halves."""
    return ancestors_of(nodes, through=lambda node: placed.get(node, half) == half)


def _carry(made: Flows, node: Node, source: Half, reader: Half) -> None:
    """Records the path of a value from the half that computes it to one that reads it."""
    made.gives[source][node] = None
    if source.stage == reader.stage:
        return
    if source.op == FORWARD and source.stage < reader.stage:
        made.messages[FORWARD, source.stage, reader.stage][node] = None
    else:  # towards stage 0: a gradient, or a value that the later stage's forward half has saved
        giver = Half(source.stage, BACKWARD)
        if source != giver:
            made.reads[giver][node] = None
        made.messages[BACKWARD, source.stage, reader.stage][node] = None


def messages_of(made: Flows, ranks: Sequence[int], lists: Sequence[Sequence[Action]]) -> dict[StageLink, tuple[str, ...]]:
    """Keys of the values sent on each link. A value that two stages of a rank read goes to the one that runs first, and stays there.

    ranks  of each stage
    lists  each rank's actions
    """
    turns: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for actions in lists:
        for turn, item in enumerate(actions):
            turns[item.direction, item.stage][item.microbatch] = turn
    found: dict[StageLink, tuple[str, ...]] = {}
    for (op, source, target), nodes in made.messages.items():
        if ranks[source] == ranks[target]:
            continue
        first = [
            stage for stage in range(len(ranks))
            if ranks[stage] == ranks[target] and _precedes(turns[op, stage], turns[op, target])
        ]  # fmt: skip
        there = {node for stage in first for node in made.messages.get((op, source, stage), ())}
        sent = [node for node in nodes if node not in there]
        _refuse_used_rows(sent)
        if sent:
            found[StageLink(op, source, target)] = tuple(map(flow_of, sent))
    return found


def _refuse_used_rows(sent: Iterable[Node]) -> None:
    """Raises PlanError if used rows of experts would be sent: their number is data of one rank (`meshc/ir/used_rows_dims.py`)."""
    for node in sent:
        if dim_of(node) is not None:
            raise PlanError(
                f"a stage of the pipeline begins within the experts of {record(node).source.module or 'the model'}\n"
                "  what to do: name modules in Options(pipeline=Pipelining(splits=...)) that hold a layer's experts whole, or "
                "stand behind them"
            )


def _precedes(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    """Whether one stage runs each microbatch before another does, by their turns."""
    return all(microbatch in one and one[microbatch] < turn for microbatch, turn in other.items())


def worth_keeping(node: Node) -> bool:
    """Whether a value is kept rather than recomputed: random draws, results of collectives, products."""
    target = node.target
    heavy = isinstance(target, torch._ops.OpOverload) and (target.namespace == "meshc" or target.overloadpacket is torch.ops.aten.mm)
    return spmd.is_collective(target) or (is_tensor(node) and heavy)
