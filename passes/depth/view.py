"""View: the global view of the whole model, from that of the layers that were captured.

What the passes read of it has been decided by then; stages ask it which forward operator a gradient belongs to, and verification runs it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from meshc.passes.depth.blocks import blocks_of
from meshc.passes.depth.copies import Growing
from meshc.passes.depth.mentions import Mentions
from meshc.passes.phases.depth import Depth
from meshc.passes.phases.later import Later
from meshc.passes.phases.traced import Joint
from meshc.program.program import Port


def view_of(joint: Joint, depth: Depth | None) -> Later[Joint]:
    """Made when it is asked for: most compilations do not. Raises Unequal then."""
    return Later((lambda: joint) if depth is None else partial(_grown, joint, depth))


def _grown(joint: Joint, depth: Depth) -> Joint:
    """Its ports do not say how they lie."""
    for stretch in reversed(depth.stretches):
        mentions = Mentions(stretch)
        plain = replace(joint, inputs=_without_shardings(joint.inputs), outputs=_without_shardings(joint.outputs))
        made = Growing(plain.graph, blocks_of(plain, mentions), mentions).run(plain.inputs, plain.outputs)
        updates = {made.kept[node]: mentions.later().text(name) for node, name in joint.updates.items()}
        for node, row in made.copies.items():
            if node in joint.updates:
                updates |= {copy: mentions.inside(frozenset(), n).text(joint.updates[node]) for n, copy in row.items()}
        joint = Joint(made.graph, made.inputs, made.outputs, joint.constants, updates)
    return joint


def _without_shardings(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    return tuple(replace(port, sharding=None) for port in ports)
