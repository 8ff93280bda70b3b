"""Block numbers of a graph's nodes in a stretch of repeated layers, by module paths and port names (`block_twins.py` proves them).

    parameter:model.layers.2.mlp.up_proj.weight     block 2, and so its update
    mm  # model.layers.2.mlp.up_proj                block 2
    add # model, of values of layers 1 and 2        block 2: code of the list's owner goes with its last operand
    all_reduce # of layer 1's sum, for layer 2      block 2: a reshard for one reader belongs to the reader's block
    cos # model.rotary_emb                          none
    slice # model.layers.1, of a mask               none, if other layers read it too: the first reader computes it for all
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch.fx import Graph, Node

from meshc.ir import records
from meshc.ir.graph import placeholders
from meshc.ir.schemas import call_number
from meshc.passes.depth.mentions import Mentions
from meshc.passes.phases.captured_depth import INSIDE, Depth
from meshc.passes.phases.traced_model import Joint
from meshc.program.program import Port

Blocks: TypeAlias = dict[Node, int]
"""Block numbers, from the stretch's first; nodes of no block are left out."""

NAMED = ("parameter", "buffer", "state", "gradient")
"""Kinds of ports that have a parameter's or buffer's name."""


def blocks_of(joint: Joint, mentions: Mentions) -> Blocks:
    """Block numbers in the global view."""
    found = _entering(joint.graph, joint.inputs, mentions)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            label = joint.updates.get(node)
            block = _near(node, found, mentions) if label is None else mentions.block(label)
            if block is not None:
                found[node] = block
    return _without_common(joint.graph, found)


def counts_of(joint: Joint, depth: Depth | None) -> Mapping[Node, int]:
    """Multiplicities of the nodes that stand for several of the whole model, those of block 1 of each stretch."""
    found: dict[Node, int] = {}
    for stretch in depth.stretches if depth is not None else ():
        blocks = blocks_of(joint, Mentions(stretch))
        found |= {node: 1 + stretch.left_out for node, block in blocks.items() if block == 1}
    return found


def local_blocks_of(graph: Graph, inputs: tuple[Port, ...], whole: Mapping[str, int | None], mentions: Mentions) -> Blocks:
    """Block numbers in the per-rank graph. `whole`: block numbers of the global view's values, by name."""
    found = _entering(graph, inputs, mentions)
    for node in graph.nodes:
        if node.op == "call_function":
            name = records(node)[0].of.partition(".")[0]
            block = whole[name] if name in whole else _near(node, found, mentions)
            if block is not None:
                found[node] = block
    _give_to_readers(graph, found, mentions)
    return _without_common(graph, found)


def _give_to_readers(graph: Graph, found: Blocks, mentions: Mentions) -> None:
    """Moves nodes that belong to no module and to no value of the global view into the block that alone reads them. Such nodes are inserted
    where first needed: a layer may leave the running sum of the gradient norm partial, and the next one reduces it, behind some of its
    own."""
    for node in reversed(graph.nodes):
        if node in found and node.op == "call_function" and not records(node)[0].of and not _module(node, mentions):
            reader, *others = {found.get(user) for user in node.users} or (None,)
            if reader is not None and not others:
                found[node] = reader


def _without_common(graph: Graph, found: Blocks) -> Blocks:
    """Removes nodes of inner blocks that depend on no layer and are read outside their block."""
    made = set[Node]()
    for node in graph.nodes:
        if found.get(node) in INSIDE and node.op == "call_function" and call_number(node) is None:
            if all(operand not in found or (operand in made and found[operand] == found[node]) for operand in node.all_input_nodes):
                made.add(node)
    for node in reversed(graph.nodes):
        if node in made and any(found.get(user) != found[node] for user in node.users if user.op != "output"):
            del found[node]
    return found


def _entering(graph: Graph, inputs: tuple[Port, ...], mentions: Mentions) -> Blocks:
    found = Blocks()
    for node, port in zip(placeholders(graph), inputs, strict=True):
        block = mentions.block(port.of or port.name) if port.kind in NAMED else None
        if block is not None:
            found[node] = block
    return found


def _near(node: Node, found: Blocks, mentions: Mentions) -> int | None:
    """By the module of a node's source; by the block of its last operand, where that module holds the list."""
    module = _module(node, mentions)
    if module:
        return mentions.block(module)
    return next((found[operand] for operand in reversed(node.all_input_nodes) if operand in found), None)


def _module(node: Node, mentions: Mentions) -> str:
    """The module of a node's source; empty for code that is in no module, or in one that holds the list."""
    module = records(node)[0].source.module
    return "" if mentions.stretch.path.startswith(f"{module}.") else module
