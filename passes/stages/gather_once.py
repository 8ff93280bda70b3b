"""Gathers of stored parameters hoisted out of the microbatches: once a call, where memory allows.

    each:  w = all_gather(stored); y = mm(x, w)        before:  gathered:w = all_gather(stored)
                                              becomes  each:    y = mm(x, gathered:w)

Without this a stage of a pipeline would gather its parameters, and reduce-scatter their gradients, once a microbatch and half. With it
gradients add up whole and are reduced after the last microbatch. It costs the bytes of the stage's parameters, twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Graph, Node

from meshc.ir import spmd
from meshc.ir.graph import add_placeholder, copied_node, copy_graph, equal_calls
from meshc.ir.keys import key_of
from meshc.passes.phases.splitter import Splitter
from meshc.passes.stages.stage_assignment import kinds
from meshc.program.program import Stage


def gather_once(stages: Mapping[str, Stage]) -> Mapping[str, Stage]:
    """The stages with the gathers of parameters moved from `each` to `before`."""
    each = replace(stages["each"], graph=copy_graph(stages["each"].graph))
    keys = each.keys()
    learned = kinds(each.graph, keys).learned
    gathers = dict.fromkeys(node for node in each.graph.nodes if node in learned and node.target is spmd.all_gather)
    for node, first in equal_calls(gathers):  # forward and backward each have their own
        node.replace_all_uses_with(first)
        del gathers[node]
    if not gathers:
        return stages
    results = each.results()
    split = Splitter(each.graph, keys)
    given = {node: key_of("gathered", node.name) for node in gathers}
    made = split.stage("before", {key: node for node, key in given.items()}, {})
    before = _join_stages(stages["before"], made) if "before" in stages else made
    return {**stages, "before": before, "each": split.stage("each", results, given)}


def _join_stages(one: Stage, other: Stage) -> Stage:
    """Both stages as one; an input of both enters once."""
    graph = Graph()
    entered: dict[str, Node] = {}
    results: dict[str, Node] = {}
    copies: list[tuple[Stage, dict[Node, Node]]] = []
    for stage in (one, other):
        env: dict[Node, Node] = {}
        for node, key in stage.keys().items():
            if key not in entered:
                entered[key] = add_placeholder(graph, node)
            env[node] = entered[key]
        copies.append((stage, env))
    for stage, env in copies:
        for node in stage.graph.nodes:
            if node.op == "call_function":
                env[node] = copied_node(graph, node, env.__getitem__)
        results |= {key: env[node] for key, node in stage.results().items()}
    graph.output(tuple(results.values()))
    return Stage("before", graph, tuple(entered), tuple(results))
