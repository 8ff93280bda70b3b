"""Grow: the per-rank graph of the whole model, from that of the captured layers.

    norm_0 attend_0 .. norm_1 attend_1 .. norm_2 .. norm_3 ..     becomes     norm_0 .. norm_1 .. norm_2 .. 28 more .. norm_31 ..

The model has been proved to repeat itself (`prove_depth.py`); here two inner blocks of the global view and of the per-rank graph are
proved equal node by node, and the per-rank graph's block is copied. Passes after this one see the whole graph: cuts, buckets, liveness
reach across layers. The global view is grown on request (`copies.py`). A model that is captured whole is left unchanged.
"""

from __future__ import annotations

import re
from dataclasses import replace

from torch.fx import Graph

from meshc.ir import records
from meshc.passes.depth.block_twins import twins
from meshc.passes.depth.blocks import Blocks, blocks_of, local_blocks_of
from meshc.passes.depth.copies import GraphGrower, GrownGraph
from meshc.passes.depth.mentions import NAME, Mentions, unnamed_factors
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.captured_depth import Stretch
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.traced_model import Joint
from meshc.program.program import Stage


def grow(lowered: LoweredProgram) -> LoweredProgram:
    """Raises Unequal."""
    depth = lowered.depth
    assert depth is not None
    (stage,) = lowered.stages.values()
    joint = lowered.placed.joint
    local = GrownGraph(stage.graph, lowered.inputs, lowered.outputs, {}, {}, 0)
    count = sum(NAME.fullmatch(name) is not None for name in lowered.placed.names.of.values())
    for stretch in depth.stretches:
        _refuse_some_checkpointed(stage.graph, stretch)
    for stretch in reversed(depth.stretches):  # from the back, so that what stands before keeps its numbers
        local, count = _grow_stretch(local, joint, stretch, count)
    paths = [path for index, path in enumerate(depth.output.paths()) if index not in depth.output.plain]
    if paths != [port.name for port in local.outputs if port.kind == "output"]:
        raise Unequal("outputs of the model are called otherwise than its code calls them")
    made = Stage(stage.name, local.graph, tuple(port.key for port in local.inputs), tuple(port.key for port in local.outputs))
    model = replace(lowered.model, output_tree=depth.output, random_calls=lowered.model.random_calls + local.draws)
    return replace(lowered, model=model, stages={made.name: made}, inputs=local.inputs, outputs=local.outputs)


def _refuse_some_checkpointed(graph: Graph, stretch: Stretch) -> None:
    """Raises Unequal if some layers of a stretch are checkpointed and others not: nothing proves which of those left out are."""
    layer = re.compile(rf"{re.escape(stretch.path)}\.\d+(?=\.|$)")
    sources = [records(node)[0].source for node in graph.nodes if node.op == "call_function"]
    found = {(at.group(), bool(source.region)) for source in sources if (at := layer.match(source.module)) is not None}
    checkpointed = {name for name, region in found if region}
    if checkpointed and checkpointed != {name for name, _ in found}:
        raise Unequal(f"some layers of {stretch.path} are checkpointed, and others not")


def _grow_stretch(local: GrownGraph, joint: Joint, stretch: Stretch, count: int) -> tuple[GrownGraph, int]:
    """The per-rank graph with the copies of one stretch, and the number of unnamed factors in it. `count`: their number before."""
    mentions = Mentions(stretch)
    blocks, pairs = pairs_of(joint, mentions)
    by_name = {node.name: blocks.get(node) for node in joint.graph.nodes}
    local_blocks = local_blocks_of(local.graph, local.inputs, by_name, mentions)
    one, other = ([node for node in local.graph.nodes if local_blocks.get(node) == block] for block in (1, 2))
    rows = [pair for a, b in zip(one, other, strict=False) for pair in zip(records(a), records(b), strict=False)]
    shardings = ((mine.sharding, theirs.sharding) for mine, theirs in rows)
    mentions = Mentions(stretch, unnamed_factors(shardings, count, stretch.left_out))
    made = GraphGrower(local.graph, local_blocks, mentions, pairs).build_graph(local.inputs, local.outputs)
    return replace(made, draws=made.draws + local.draws), count + len(mentions.unnamed.next) * stretch.left_out


def pairs_of(joint: Joint, mentions: Mentions) -> tuple[Blocks, dict[str, str]]:
    """The block numbers of the global view, and, by name, each value of block 1 -> its equal in block 2. Raises Unequal."""
    blocks = blocks_of(joint, mentions)
    return blocks, {twin.one.name: twin.other.name for twin in twins(joint.graph, blocks, mentions, {})}
