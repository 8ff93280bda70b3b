"""Cut: a program in autograd mode as a forward and a backward stage, with the values that forward saves for backward.

    forward:  inputs, parameters -> outputs, saved values            backward: tangents, saved values, parameters -> gradients

A node belongs to the backward stage if it depends on a tangent or has phase backward. Values of the forward stage that it reads are saved,
except layouts of parameters and integers, which are recomputed. From here on a node's phase is that of its stage, also for the collectives
of outputs, which partition emitted last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.ir import calls_of, is_integer, update
from meshc.ir.graph import ancestors_of, descendants_of
from meshc.ir.keys import is_a, key_of
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.splitter import split_stage
from meshc.program.program import Instruction, Stage

aten = torch.ops.aten

LAYOUTS: Final = (
    aten.t.default, aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
)  # fmt: skip
"""Operators whose results are recomputed of parameters."""


def cut_backward(lowered: LoweredProgram) -> LoweredProgram:
    """Two stages for a program in autograd mode; other programs are unchanged."""
    stage = next(iter(lowered.stages.values()))
    if not any(is_a(key, "tangent") for key in stage.inputs):
        return lowered
    graph, keys, results = stage.graph, stage.keys(), stage.results()
    tangents = [node for node, key in keys.items() if is_a(key, "tangent")]
    late = descendants_of([*tangents, *calls_of(graph, "backward")])
    outputs = {key: node for key, node in results.items() if not is_a(key, "gradient")}
    gradients = {key: node for key, node in results.items() if key not in outputs}
    again = late | _recomputed_nodes(graph, keys, late)
    needed = ancestors_of(gradients.values(), through=again.__contains__)
    saved = {node: key_of("saved", node.name) for node in sorted(needed) if node.op == "call_function" and node not in again}
    forward = split_stage("forward", keys, outputs | {key: node for node, key in saved.items()})
    backward, *spare = (_of_one_phase(split_stage("backward", keys, gradients, saved)) for _ in range(1 + (len(tangents) > 1)))
    return replace(
        lowered,
        stages={"forward": _of_one_phase(forward), "backward": backward},
        backward=spare[0] if spare else None,  # a copy: later passes write into the stages
        schedule=(Instruction("run", "forward"), Instruction("run", "backward")),
    )


def _of_one_phase(stage: Stage) -> Stage:
    for node in stage.graph.nodes:
        if node.op == "call_function":
            update(node, phase=stage.name)
    return stage


def _recomputed_nodes(graph: Graph, keys: Mapping[Node, str], late: set[Node]) -> set[Node]:
    """Forward nodes that the backward stage recomputes: integers, and layouts of parameters."""
    light: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and node not in late:
            of_parameters = all(x in light or is_a(keys.get(x, ""), "parameter") for x in node.all_input_nodes)
            if is_integer(node) or (node.target in LAYOUTS and of_parameters):
                light.add(node)
    return light
