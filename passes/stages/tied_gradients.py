"""Gradients of parameters shared by several stages: accumulated separately on each stage, added up once a call.

    each:  part:g = add(g0, g3)            stage 0: part:g0     stage 3: part:g3
                                  becomes  after:   sum:g = add(sum:g0, sum:g3)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from meshc.ir import record, set_record
from meshc.ir.graph import call, copy_graph, placeholders
from meshc.ir.keys import is_a, key_of, name_of
from meshc.passes.stages.stage_assignment import Half
from meshc.program.program import Stage

aten = torch.ops.aten


@dataclass
class MicrobatchResults:
    """Results of a microbatch by key, each with the half that computes it; the stage after the last microbatch; additions left out."""

    made: dict[str, tuple[Node, Half]]
    after: Stage
    apart: set[Node] = field(default_factory=set)


def microbatch_results(each: Stage, after: Stage, placed: Mapping[Node, Half], end: Half) -> MicrobatchResults:
    """The results of a microbatch, sums over several stages split into terms. `end`: the half of results without one."""
    found = MicrobatchResults({}, after)
    for key, node in each.results().items():
        terms = _terms(node, placed) if is_a(key, "part") else [node]
        for term in terms:
            found.made[key_of("part", term.name) if len(terms) > 1 else key] = (term, placed.get(term, end))
        if len(terms) > 1:
            _leave_out(node, terms, found.apart)
            found.after = _add_terms_after(found.after, key_of("sum", name_of(key)), [key_of("sum", term.name) for term in terms])
    return found


def _terms(node: Node, placed: Mapping[Node, Half]) -> list[Node]:
    """The terms of a sum by stages: gradients of a tied parameter are sent once a call, not with every microbatch."""
    if not adds_same_shapes(node) or len({placed[x] for x in node.all_input_nodes if x in placed}) < 2:
        return [node]
    return [term for operand in node.args for term in _terms(operand, placed)]  # type: ignore[arg-type]


def adds_same_shapes(node: Node) -> bool:
    """Whether a node adds up tensors of its own shape."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    return all(isinstance(operand, Node) and record(operand).shape == record(node).shape for operand in node.args)


def _leave_out(node: Node, terms: Sequence[Node], apart: set[Node]) -> None:
    """Collects the additions that are now done after the last microbatch: no stage computes them, unless it reads them."""
    if node not in terms and all(user.op == "output" or user in apart for user in node.users):
        apart.add(node)
        for operand in node.all_input_nodes:
            _leave_out(operand, terms, apart)


def _add_terms_after(after: Stage, key: str, terms: Sequence[str]) -> Stage:
    """A copy of `after` in which a sum enters as several terms, which it adds up."""
    graph = copy_graph(after.graph)
    entered = placeholders(graph)
    place = after.inputs.index(key)
    old = entered[place]
    with graph.inserting_before(old):
        made = [graph.placeholder(term.replace(":", "_").replace(".", "_")) for term in terms]
    for node in made:
        set_record(node, record(old))
    total = made[0]
    last = entered[-1]
    for term in made[1:]:
        with graph.inserting_after(last if last is not old else made[-1]):
            total = last = call(graph, replace(record(old), reason="gradients of several stages"), aten.add.Tensor, total, term)
    old.replace_all_uses_with(total)
    graph.erase_node(old)
    return Stage(after.name, graph, (*after.inputs[:place], *terms, *after.inputs[place + 1 :]), after.outputs)
