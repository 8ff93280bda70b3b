"""Faults that others' systems had in silence, as they would be here: the plan's program is proved, and the faulty one refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import Node

from meshc.ir import record, records, spmd
from meshc.ir.graph import call, copy_graph
from meshc.program.program import PlainProgram
from meshc.proof.program_proof import prove
from tests.proof.edited_lines import behind, left_out, nodes, put
from tests.proof.mutants import base

aten, meshc = torch.ops.aten, torch.ops.meshc
Fault = Callable[[PlainProgram], object]


def of(program: PlainProgram, target: object, reason: str = "", at: int = 0) -> Node:
    return nodes(program, target, where=lambda node: reason in records(node)[0].reason)[at]


def scattered_over_another_group(program: PlainProgram) -> None:
    shard = of(program, spmd.shard)
    other = next(node for node in nodes(program, spmd.coordinate) if node is not shard.args[3])
    shard.prepend(other)
    put(shard, 3, other)


def gathered_over_another_group(program: PlainProgram) -> None:
    node = of(program, spmd.all_gather)
    put(node, 1, [axis.name for axis in program.mesh.axes if axis.name not in node.args[1]])  # type: ignore[operator]


def bias_added_by_each_rank(program: PlainProgram) -> None:
    node = next(node for node in nodes(program, aten.addmm.default) if dict(record(node).sharding.partial))  # type: ignore[union-attr]
    first = node.args[0]
    assert isinstance(first, Node) and first.target is spmd.keep_first
    put(node, 0, first.args[0])


def viewed_without_an_exchange(program: PlainProgram) -> None:
    node = of(program, spmd.all_to_all)
    with node.graph.inserting_before(node):
        made = call(node.graph, record(node), aten.reshape.default, node.args[0], list(record(node).shape))
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def scaled(reason: str, target: object, by: float) -> Fault:
    return lambda program: behind(of(program, target, reason), aten.mul.Scalar, by)


REPORTED: dict[str, tuple[str, Fault]] = {
    "Megatron-LM#7452, 4: recomputation gathers over the wrong group": ("recomputed", gathered_over_another_group),
    "Megatron-LM#7452, 7: embeddings are scattered over the wrong group": ("gpt dp tp", scattered_over_another_group),
    "Megatron-LM#7452, 8: split values are left out of the clipping norm": (
        "gpt dp tp", lambda program: left_out(of(program, spmd.all_reduce, "the gradient norm"))
    ),
    "Megatron-LM#1446: gradients of norms on split sequences are not added up": (
        "gpt megatron_sp", lambda program: left_out(of(program, spmd.all_reduce, "reductions together"))
    ),
    "Megatron-LM#1464: gradients of keys do not return to their rank": (
        "ring", lambda program: left_out(of(program, spmd.ring_shift, "gradient attention_backward", -1))
    ),
    "Megatron-LM#5916: the clipping norm leaves experts out": (
        "experts whose rows are sent", lambda program: left_out(of(program, spmd.all_reduce, "the gradient norm"))
    ),
    "Megatron-LM#673: the loss is scaled by the ranks of a split sequence": ("ring", scaled("", aten.neg.default, 0.5)),
    "pytorch#160285: gradients of experts are too large by the number of ranks": (
        "experts whose rows are sent", scaled("", meshc.used_outer.default, 4.0)
    ),
    "pytorch#163193: what is added once is added by each rank to its part": ("gpt dp tp", bias_added_by_each_rank),
    "pytorch#179502: a split dim is viewed without an exchange": ("gpt ulysses", viewed_without_an_exchange),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTED)
def test_what_was_reported_is_refused(report: str) -> None:
    name, fault = REPORTED[report]
    own = base(name)
    assert prove(own.program, own.traced, own.constants).holds
    copies = {key: replace(stage, graph=copy_graph(stage.graph)) for key, stage in own.program.stages.items()}
    program = replace(own.program, stages=copies)
    assert fault(program) is not False
    assert not prove(program, own.traced, own.constants).holds
