"""Return values of the user's modules: by value, the paths of the modules that return it.

    linear: 3 dims, computed in mlp.down_proj, read by an addition of layers.0             returned by mlp.down_proj and mlp
    keys:   4 dims, computed in layers.0.self_attn, an output of the model (a cache)        returned by layers.0.self_attn, layers.0, ...

A value is returned by a call of a module if it was computed during the call and is read in forward after it, or is the model's output. That
covers containers, whose own code computes nothing, and values that leave a module through a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from meshc.frontend.sources import module_calls
from meshc.ir import KEY, records, update
from meshc.ir.graph import results_of
from meshc.program.program import Port


def mark_module_outputs(graph: Graph, outputs: Sequence[Port]) -> None:
    """Fills `returned_by` of every forward value, outermost module first; the whole model has no path and is left out."""
    results = {node for node, port in zip(results_of(graph), outputs, strict=True) if port.kind == "output"}
    calls = {node: dict(module_calls(node)) for node in graph.nodes if _is_forward(node)}
    for node, made_in in calls.items():
        if isinstance(node.meta[KEY], tuple):
            continue  # read by getitem, of the same call
        readers = [calls[user] for user in node.users if user in calls] + [{}] * (node in results)
        returned = (path for call, path in made_in.items() if path and any(call not in reader for reader in readers))
        update(node, returned_by=tuple(dict.fromkeys(returned)))


def _is_forward(node: Node) -> bool:
    return node.op == "call_function" and records(node)[0].phase == "forward"
