"""Multiplicity of captured nodes; order, names and places of Python values in the whole model of the layers that they stand for.

    captured   0 1 2 3     |     3 2 1 0        block 1 stands for 29
    whole      0 1 . . . 2 3 | 3 2 . . . 1 0    the others come at its seams: behind it in forward, before it in backward
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from torch.fx import Node

from meshc.frontend.read_places import ATTRIBUTE, ITEM, MODEL, ReadPlace, Step
from meshc.ir import records
from meshc.ir.graph import placeholders
from meshc.passes.depth.block_twins import twins
from meshc.passes.depth.blocks import blocks_of, counts_of
from meshc.passes.depth.mentions import Mentions
from meshc.passes.depth.order import seams
from meshc.passes.phases.captured_depth import CAPTURED, Depth
from meshc.passes.phases.traced_model import Joint


@dataclass(frozen=True)
class LayerMultiplicity:
    """
    block  node of a stretch -> (number of the stretch, number of the block in it)
    place  node of a stretch -> index of its layer within the block
    twin   node of block 2 -> its equal in block 1
    count  node of block 1 -> the number of nodes that it stands for, itself included
    """

    block: dict[Node, tuple[int, int]] = field(default_factory=dict)
    place: dict[Node, int] = field(default_factory=dict)
    twin: dict[Node, Node] = field(default_factory=dict)
    count: dict[Node, int] = field(default_factory=dict)
    _seam: dict[Node, int] = field(default_factory=dict)

    def one(self, node: Node) -> Node:
        """The node of block 1 for a node of block 1 or 2."""
        return self.twin.get(node, node)

    def seam(self, node: Node) -> int | None:
        """For a node of block 1 or 2: the position in the graph before which the nodes that are left out come."""
        return self._seam.get(self.one(node))


def multiplicity_of(joint: Joint, depth: Depth | None) -> LayerMultiplicity:
    """Multiplicities in the captured global view. Raises Unequal where two inner blocks differ."""
    found = LayerMultiplicity(count=dict(counts_of(joint, depth)))
    nodes, ports = [*joint.graph.nodes], dict(zip(placeholders(joint.graph), joint.inputs, strict=True))
    for number, stretch in enumerate(depth.stretches if depth is not None else ()):
        mentions = Mentions(stretch)
        blocks = blocks_of(joint, mentions)
        pairs = {twin.one: twin.other for twin in twins(joint.graph, blocks, mentions, {})}
        inside = {node: (number, block) for node, block in blocks.items() if 0 <= block < CAPTURED}
        found.block.update(inside)
        for node in inside:  # by the parameter or module by which it belongs to a layer
            port = ports.get(node)
            owner = joint.updates.get(node) or records(node)[0].source.module if port is None else port.of or port.name
            found.place[node] = stretch.place(mentions.layer(owner) or 0)
        found.twin.update((other, one) for one, other in pairs.items())
        found._seam.update(seams(nodes, blocks, pairs))
    return found


def whole_names(depth: Depth | None, name: str) -> tuple[str, ...]:
    """All names in the whole model of a module, parameter or value of the captured layers: layers.1.up of four captured layers is
    layers.1.up to layers.29.up, and layers.3.up is layers.31.up."""
    names = [name]
    for stretch in reversed(depth.stretches if depth is not None else ()):  # from the back: what stands before keeps its numbers
        mentions = Mentions(stretch)
        copies = range(1, stretch.left_out + 1)
        names = [
            renaming.text(name)
            for name in names
            for renaming in (mentions.later(), *(mentions.inside(frozenset(), copy) for copy in copies if mentions.block(name) == 1))
        ]
    return tuple(names)


def whole_places(depth: Depth | None, model: nn.Module, places: Sequence[ReadPlace]) -> tuple[ReadPlace, ...]:
    """Places of Python values that a trace of the captured layers has read, in the whole model: captured layers under their own numbers,
    and for each layer left out the places of the inner layers, of which it is a copy."""
    found = list(places)
    if depth is None:
        return tuple(found)
    for path, numbers in depth.captured.items():
        steps = tuple(step for name in path.split(".") for step in ((ATTRIBUTE, "_modules"), (ITEM, name)))
        inside = {each for one in depth.stretches if one.path == path for each in range(len(numbers)) if one.block(each) == 1}
        left_out = [number for number, _ in enumerate(model.get_submodule(path).children()) if number not in numbers]
        found = [own for place in found for own in _of_layers(place, (*steps, (ATTRIBUTE, "_modules")), numbers, inside, left_out)]
    return tuple(dict.fromkeys(found))


def _of_layers(
    place: ReadPlace, steps: Sequence[Step], numbers: Sequence[int], inside: Collection[int], left_out: Sequence[int]
) -> Iterator[ReadPlace]:
    """A place in a layer of the list at `steps`, for all layers that it stands for; any other place unchanged."""
    at = len(steps)
    if place.root != MODEL or place.steps[:at] != steps or len(place.steps) <= at or place.steps[at][0] != ITEM:
        yield place
        return
    layer = int(place.steps[at][1])
    for number in (numbers[layer], *(left_out if layer in inside else ())):
        yield replace(place, steps=(*steps, (ITEM, str(number)), *place.steps[at + 1 :]))
