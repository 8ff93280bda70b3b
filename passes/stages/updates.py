"""Optimizer update after the last microbatch, cut by ranks: each updates the parameters of its own stages.

    total = sq(g0) + sq(g1) + sq(g2)          rank 0:  part = sq(g0) + sq(g1)      total = all_reduce(part, ["pp"], "sum")
    w2 = adam(w2, g2 * f(total))      becomes  rank 1:  part = sq(g2)               total = all_reduce(part, ["pp"], "sum")
                                                        w2 = adam(w2, g2 * f(total))

The gradient norm is the only value that parameters of different stages share: a sum, computed over each rank's own terms first. Values of
it alone are computed on every rank. Outputs, metrics and buffers are broadcast by the rank that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.errors import CompileError
from meshc.ir import record, records, spmd, update
from meshc.ir.graph import call, copy_into
from meshc.passes.phases.splitter import split_stage
from meshc.program.program import Stage

aten = torch.ops.aten

ALL: Final = -1
"""The rank of a node that every rank computes."""


@dataclass
class Updates:
    """Rank of each node of the stage after the last microbatch, or ALL; nodes without a rank are computed where they are read."""

    placed: dict[Node, int] = field(default_factory=dict)
    totals: dict[Node, list[Node]] = field(default_factory=dict)  # sums over ranks, each with its terms


def place_updates(stage: Stage, entering: Mapping[str, int], owners: Mapping[str, int], labels: Mapping[str, str]) -> Updates:
    """The rank of each node of `stage`. Raises CompileError if values of several ranks are mixed by another operator than an addition.

    entering  rank of each key that enters: parameters, states, sums
    owners    rank of a parameter by its name
    labels    global-view value -> the parameter of the update that it belongs to
    """
    found = Updates()
    keys = stage.keys()
    for node in stage.graph.nodes:
        if node.op == "placeholder" and keys[node] in entering:
            found.placed[node] = entering[keys[node]]
        elif node.op == "call_function":
            name = labels.get(records(node)[0].of.partition(".")[0])
            homes = {found.placed[x] for x in node.all_input_nodes if x in found.placed}
            if name is not None and name in owners:
                found.placed[node] = owners[name]
            elif len(homes - {ALL}) > 1 or (len(homes) > 1 and _adds_two(node)):
                found.totals[node] = _terms(node, found)
                found.placed[node] = ALL
            elif homes:
                found.placed[node] = (sorted(homes - {ALL}) or [ALL])[0]
    for node in list(found.totals):  # additions that only other sums read
        if node.users and found.totals.keys() >= node.users.keys():
            del found.totals[node]
    return found


def _terms(node: Node, found: Updates) -> list[Node]:
    """The terms of an addition over several ranks; nested additions are flattened."""
    if not _adds_two(node):
        raise CompileError(
            f"{node.name} at {record(node).source} mixes parameters of several pipeline stages in the update, which only a sum may\n"
            "  what to do: an optimizer that updates each parameter by itself, or a mesh without pp"
        )
    terms: list[Node] = []
    for operand in node.args:
        assert isinstance(operand, Node)
        terms += found.totals[operand] if operand in found.totals else [operand]
    return terms


def _adds_two(node: Node) -> bool:
    return node.target is aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs


def cut_updates(stage: Stage, found: Updates, ranks: int, axis: str, kept: Mapping[str, int]) -> list[Stage]:
    """The stage of each rank. `kept`: the rank of each output that leaves on one rank only; the others leave on all."""
    return [_of_rank(stage, found, rank, axis, kept) for rank in range(ranks)]


def _of_rank(stage: Stage, found: Updates, rank: int, axis: str, kept: Mapping[str, int]) -> Stage:
    copy = Graph()
    env: dict[Node, Node] = {}
    copy_into(copy, stage.graph, env)
    keys = {env[node]: key for node, key in stage.keys().items()}
    for total, terms in found.totals.items():
        homes = {term: found.placed.get(term, ALL) for term in terms}
        mine, shared = ([env[term] for term in terms if homes[term] == home] for home in (rank, ALL))
        env[total] = _sum_over_ranks(copy, env[total], mine, shared, axis)  # a total may be an output: a loss with a term of weights
    results: dict[str, Node] = {}
    for key, old in stage.results().items():
        new = env[old]
        home = found.placed.get(old, ALL)
        if key in kept:
            if kept[key] == rank:
                results[key] = new
        else:
            results[key] = new if home == ALL else _to_all(copy, new, home, rank, axis)
    copy.output(tuple(results.values()))
    return split_stage(f"after_{rank}", keys, results)


def _sum_over_ranks(graph: Graph, total: Node, mine: list[Node], shared: list[Node], axis: str) -> Node:
    """The total over ranks. `mine`: terms of this rank; `shared`: terms that all ranks have, added once."""
    made = record(total)
    with graph.inserting_before(total):
        part = mine[0] if mine else _zeros(graph, total)
        for term in mine[1:]:
            part = call(graph, made, aten.add.Tensor, part, term)
        whole = call(graph, made, spmd.all_reduce, part, [axis], "sum")
        update(whole, reason="the gradient norm, over all stages")
        for term in shared:
            whole = call(graph, made, aten.add.Tensor, whole, term)
    total.replace_all_uses_with(whole)
    graph.erase_node(total)
    return whole


def _to_all(graph: Graph, node: Node, home: int, rank: int, axis: str) -> Node:
    """An output on every rank, broadcast from the rank `home`."""
    sent = node if home == rank else _zeros(graph, node)
    return call(graph, replace(record(node), reason="an output, for every stage"), spmd.broadcast, sent, [axis], home)


def _zeros(graph: Graph, like: Node) -> Node:
    found = record(like)
    made = replace(found, reason="", of="")
    return call(graph, made, aten.full.default, list(found.shape), 0, dtype=found.dtype, device=torch.device("cpu"))
