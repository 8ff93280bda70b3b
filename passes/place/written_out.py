"""Attention written as separate operators: both products around a softmax, and the operators between them, by the roles of letters.

    scores = bmm(q, k)           multiplies b, contracts d
    s = scores * scale + mask
    w = softmax(s)               weighs k
    out = bmm(w, v)              multiplies b, contracts k

Rules tell which operators these are, by the roles of their letters. The operators between the two products are the region `attention`.
"""

from __future__ import annotations

from torch.fx import Node

from meshc.ir import operands, records, value_of
from meshc.passes.phases.factors import Factors, Instance


def written_out(weights: Instance, factors: Factors) -> tuple[set[Node], Instance, Instance] | None:
    """(nodes of the attention around the softmax `weights`, its first product, its second), or None if it has no such products."""
    before, scores = _to_product(weights.node, factors, forward=False)
    after, mix = _to_product(weights.node, factors, forward=True) if scores is not None else (set(), None)
    return (before | after, scores, mix) if scores is not None and mix is not None else None


def _to_product(start: Node, factors: Factors, forward: bool) -> tuple[set[Node], Instance | None]:
    """The nodes up to the nearest batched product, and that product; paths do not lead through products."""
    seen = {start}
    edge = [start]
    while edge:
        following: list[Node] = []
        for node in edge:
            for other in node.users if forward else [value_of(x)[0] for x in operands(node)]:
                if other.op != "call_function" or other in seen or records(other)[0].phase != "forward":
                    continue
                seen.add(other)
                instance = factors.instances.get(other)
                roles = instance.rule.roles.values() if instance is not None else ()
                if "multiplies" in roles:
                    return seen, instance
                if "contracts" not in roles:
                    following.append(other)
        edge = following
    return seen, None
