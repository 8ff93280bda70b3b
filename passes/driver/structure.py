"""After each pass: whether the structure of its graphs holds (`meshc/ir/verify.py`). Always: it takes 1 to 3 % of a compilation's time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.fx import Graph, GraphModule, Node

from meshc.ir import KEY
from meshc.ir.verify import Malformed, verify_graph, verify_meetings, verify_order
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.outset import Outset
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.traced import Traced
from meshc.program.program import Port

Ports = tuple[Sequence[Port] | Sequence[str], Sequence[Port] | Sequence[str]]
"""What enters and what leaves."""


class Structure:
    """Of a phase before a pass, whose structure holds. What the pass leaves as it was is not looked at again.

    ports    of each graph
    nodes    each graph's, with what a pass may put in the place of another: arguments, target and record
    records  ids of all records, which are immutable; `nodes` holds them
    """

    def __init__(self, before: Outset) -> None:
        self.ports = dict(_graphs(before))
        self.nodes = {graph: [(node, *_parts(node)) for node in graph.nodes] for graph in self.ports}
        self.records = {id(record) for rows in self.nodes.values() for *_, record in rows} if isinstance(before, Lowered) else frozenset()

    def verify(self, left: Outset) -> None:
        """Raises Malformed."""
        for graph, (inputs, outputs) in _graphs(left):
            if isinstance(left, Traced) and left.joint is None:
                verify_order(graph)
            elif self._changed(graph) or self.ports[graph] != (inputs, outputs):
                if len(set(inputs)) < len(inputs) or len(set(outputs)) < len(outputs):
                    raise Malformed("two of its ports are one")
                verify_graph(graph, len(inputs), len(outputs), left.sizes if isinstance(left, Lowered) else None, self.records)
        if isinstance(left, Lowered) and left.pipeline is not None:
            _verify_ranks({name: stage.graph for name, stage in left.stages.items()}, left.pipeline.schedule.ranks)

    def _changed(self, graph: Graph) -> bool:
        before = self.nodes.get(graph, [])
        if len(before) != len(graph.nodes):
            return True
        return any(
            old[0] is not node or any(one is not other for one, other in zip(old[1:], _parts(node), strict=True))
            for old, node in zip(before, graph.nodes, strict=True)
        )


def _parts(node: Node) -> tuple[object, object, object, object]:
    return node.args, node.kwargs, node.target, node.meta.get(KEY)


def _graphs(phase: Outset) -> Iterator[tuple[Graph, Ports]]:
    """What passes write into, with its ports."""
    if isinstance(phase, Lowered):
        yield from ((stage.graph, (stage.inputs, stage.outputs)) for stage in phase.stages.values())
    elif isinstance(phase, Traced | Placed) and (joint := phase.joint) is not None:
        yield joint.graph, (joint.inputs, joint.outputs)
    elif isinstance(phase, Traced):
        modules = (phase.model.module, *phase.model.module.children())
        yield from ((module.graph, ((), ())) for module in modules if isinstance(module, GraphModule))


def _verify_ranks(graphs: Mapping[str, Graph], count: int) -> None:
    once = [[f"{when}_{rank}" for when in ("before", "after")] for rank in range(count)]
    verify_meetings(graphs, [[name for name in names if name in graphs] for names in once])
