"""Flows: what one microbatch's stages hand to each other, and what a stage's forward half keeps for its backward half.

    stage 0, F:  h = mlp(x)                    flow:h goes to stage 1, and stays for stage 0's own backward
    stage 1, F:  y = mlp(h)                    flow:y stays
    stage 1, B:  g = mlp_backward(.., h, y)    flow:g goes to stage 0

A value goes from the stage that makes it straight to every stage that reads it, however far: residuals, encoder outputs, long skips.
Values that need only the call's inputs are made again where they are read, unless `forwarded.py` has found a home for them, since a
message is cheaper; and unless they are worth their memory: then the stage that made them forward keeps them for backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from meshc.ir import is_getitem, is_tensor, spmd
from meshc.ir.graph import made_of
from meshc.ir.keys import key_of
from meshc.passes.stages.stage_assignment import BACKWARD, FORWARD, Home, Kinds
from meshc.pipelining.schedule import Action, Link


@dataclass
class Flows:
    """Of each half of each stage: what it reads that others made, and what it hands on, by node.

    messages   (half, from stage, to stage) -> values
    """

    reads: dict[Home, dict[Node, None]] = field(default_factory=lambda: defaultdict(dict))
    gives: dict[Home, dict[Node, None]] = field(default_factory=lambda: defaultdict(dict))
    messages: dict[tuple[str, int, int], dict[Node, None]] = field(default_factory=lambda: defaultdict(dict))


def flow_of(node: Node) -> str:
    """What a flow is called; a value of one microbatch."""
    return key_of("flow", node.name)


def flows(found: Kinds, placed: Mapping[Node, Home], results: Iterable[tuple[Node, Home]]) -> Flows:
    """`results`: values that a half must make whoever reads them, each with the half that does."""
    made = Flows()
    work: dict[Home, list[Node]] = defaultdict(list)
    for node, home in placed.items():
        work[home].append(node)
    for node, home in results:
        work[home].append(node)
    forward = {home.stage: _closure(nodes, home, placed) for home, nodes in work.items() if home.half == FORWARD}
    for home in sorted(work, key=lambda home: (home.half != FORWARD, home.stage)):
        own = forward[home.stage] if home.half == FORWARD else _closure(work[home], home, placed)
        for node in own:
            source = placed.get(node)
            if source == home:
                continue
            if source is None:
                keeper = Home(home.stage, FORWARD)
                if home.half != FORWARD and node in found.given and worth_keeping(node) and node in forward.get(home.stage, ()):
                    made.reads[home][node] = None
                    made.gives[keeper][node] = None
                continue
            made.reads[home][node] = None
            _carry(made, node, source, home)
    return made


def _closure(nodes: Iterable[Node], home: Home, placed: Mapping[Node, Home]) -> dict[Node, None]:
    """What these nodes need: up to values at home elsewhere, those included, each as one tensor."""
    return made_of(nodes, through=lambda node: placed.get(node, home) == home)


def _carry(made: Flows, node: Node, source: Home, reader: Home) -> None:
    """The way of a value from where it is made to a half that reads it."""
    if source.stage == reader.stage:
        made.gives[source][node] = None
    elif source.half == FORWARD and source.stage < reader.stage:
        made.gives[source][node] = None
        made.messages[(FORWARD, source.stage, reader.stage)][node] = None
    else:  # towards stage 0: a gradient, or what the later stage's forward half has kept
        giver = Home(source.stage, BACKWARD)
        made.gives[source][node] = None
        if source != giver:
            made.reads[giver][node] = None
        made.messages[(BACKWARD, source.stage, reader.stage)][node] = None


def messages_of(made: Flows, ranks: Sequence[int], lists: Sequence[Sequence[Action]]) -> dict[Link, tuple[str, ...]]:
    """What goes from rank to rank, by keys. A value that two stages of a rank read goes to the one that runs first, and stays.

    ranks  of each stage
    lists  each rank's actions
    """
    turns: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for actions in lists:
        for turn, item in enumerate(actions):
            turns[item.direction, item.stage][item.microbatch] = turn
    found: dict[Link, tuple[str, ...]] = {}
    for (half, source, target), nodes in made.messages.items():
        if ranks[source] == ranks[target]:
            continue
        first = [
            stage for stage in range(len(ranks))
            if ranks[stage] == ranks[target] and _precedes(turns[half, stage], turns[half, target])
        ]  # fmt: skip
        there = {node for stage in first for node in made.messages.get((half, source, stage), ())}
        keys = tuple(flow_of(node) for node in nodes if node not in there)
        if keys:
            found[Link(half, source, target)] = keys
    return found


def _precedes(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    """Whether one stage runs each microbatch before another does, by their turns."""
    return all(microbatch in one and one[microbatch] < turn for microbatch, turn in other.items())


def worth_keeping(node: Node) -> bool:
    """Values that are not made twice for nothing: draws, what ranks have exchanged, products."""
    target = node.target
    if spmd.is_collective(target):
        return True
    heavy = isinstance(target, torch._ops.OpOverload) and (target.namespace == "meshc" or target.overloadpacket is torch.ops.aten.mm)
    return is_tensor(node) and not is_getitem(node) and heavy
