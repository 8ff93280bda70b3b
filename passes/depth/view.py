"""The global view of the whole model, grown from that of the captured layers on request.

Passes have decided shardings by then; stages look up the forward operator of a gradient in this view, and verification runs it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from meshc.passes.depth.blocks import blocks_of
from meshc.passes.depth.copies import GraphGrower
from meshc.passes.depth.mentions import Mentions
from meshc.passes.phases.captured_depth import Depth
from meshc.passes.phases.lazy_value import LazyValue
from meshc.passes.phases.traced_model import Joint
from meshc.program.program import Port


def view_of(joint: Joint, depth: Depth | None) -> LazyValue[Joint]:
    """Grown on first use, since most compilations need none. Raises Unequal then."""
    return LazyValue((lambda: joint) if depth is None else partial(_grow_view, joint, depth))


def _grow_view(joint: Joint, depth: Depth) -> Joint:
    """The whole model's graph; its ports have no shardings."""
    for stretch in reversed(depth.stretches):
        mentions = Mentions(stretch)
        plain = replace(joint, inputs=_without_shardings(joint.inputs), outputs=_without_shardings(joint.outputs))
        made = GraphGrower(plain.graph, blocks_of(plain, mentions), mentions).build_graph(plain.inputs, plain.outputs)
        updates = {made.kept[node]: mentions.later().text(name) for node, name in joint.updates.items()}
        for node, row in made.copies.items():
            if node in joint.updates:
                updates |= {copy: mentions.inside(frozenset(), n).text(joint.updates[node]) for n, copy in row.items()}
        joint = Joint(made.graph, made.inputs, made.outputs, joint.constants, updates)
    return joint


def _without_shardings(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    return tuple(replace(port, sharding=None) for port in ports)
