"""Cut: a program in autograd mode as a forward and a backward stage, with the values that forward saves for backward.

    forward:  inputs, parameters -> outputs, saved values            backward: tangents, saved values, parameters -> gradients

A node belongs to the backward stage if it depends on a tangent or has phase backward. Values of the forward stage that it reads are saved,
except layouts of parameters and integers, which are recomputed. From here on a node's phase is that of its stage, also for the collectives
of outputs, which partition emitted last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Graph, Node

from meshc.ir import KEY, record, records, set_record
from meshc.ir.graph import ancestors_of, descendants_of
from meshc.ir.keys import is_a, key_of
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.splitter import Splitter
from meshc.program.program import Instruction, Stage


def cut_backward(lowered: LoweredProgram) -> LoweredProgram:
    """Two stages for a program in autograd mode; other programs are unchanged."""
    stage = next(iter(lowered.stages.values()))
    if not any(is_a(key, "tangent") for key in stage.inputs):
        return lowered
    graph = stage.graph
    keys = stage.keys()
    results = stage.results()
    tangents = [node for node, key in keys.items() if is_a(key, "tangent")]
    late = descendants_of(
        [*tangents, *(node for node in graph.nodes if node.op == "call_function" and records(node)[0].phase == "backward")]
    )
    light = _recomputed_nodes(graph, keys, late)
    outputs = {key: node for key, node in results.items() if not is_a(key, "gradient")}
    gradients = {key: node for key, node in results.items() if key not in outputs}
    again = late | light
    needed = ancestors_of(gradients.values(), through=again.__contains__)
    saved = {
        node: key_of("saved", node.name) for node in graph.nodes if node in needed and node.op == "call_function" and node not in again
    }
    split = Splitter(graph, keys)
    forward = split.stage("forward", outputs | {key: node for node, key in saved.items()}, {})
    several = sum(is_a(key, "tangent") for key in stage.inputs) > 1
    backward, *spare = (_of_one_phase(split.stage("backward", gradients, saved)) for _ in range(1 + several))
    return replace(
        lowered,
        stages={"forward": _of_one_phase(forward), "backward": backward},
        backward=spare[0] if spare else None,  # a copy: later passes write into the stages
        schedule=(Instruction("run", "forward"), Instruction("run", "backward")),
    )


def _of_one_phase(stage: Stage) -> Stage:
    for node in stage.graph.nodes:
        if node.op == "call_function":
            found = tuple(replace(one, phase=stage.name) for one in records(node))
            set_record(node, found if isinstance(node.meta[KEY], tuple) else found[0])
    return stage


def _recomputed_nodes(graph: Graph, keys: Mapping[Node, str], late: set[Node]) -> set[Node]:
    """Forward nodes that the backward stage recomputes: integers, and layouts of parameters."""
    light: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node in late:
            continue
        if isinstance(node.meta["meshc"], tuple):
            continue
        if record(node).dtype is None:
            light.add(node)
        elif all(x in light or is_a(keys.get(x, ""), "parameter") for x in node.all_input_nodes) and _is_view(node):
            light.add(node)
    return light


def _is_view(node: Node) -> bool:
    target = str(node.target)
    return bool(node.all_input_nodes) and target in {
        "aten.t.default", "aten.view.default", "aten.reshape.default", "aten.transpose.int", "aten.permute.default",
        "aten.unsqueeze.default",
    }  # fmt: skip
