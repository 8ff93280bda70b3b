"""FLOPs of matrix products, convolutions and attentions, with the axes that split them and those that could.

    mm [batch 4, ffn 32] of mlp.up_proj on dp=2,tp=2       becomes       ("mlp.up_proj", "aten.mm", 2048.0, {"dp": "split", "tp": "split"})

For the summary: the decisions of `propagate`, on the global view. Operators on values that depend on no parameter and no floating input
(rotary angles) are left out: each rank computes what it needs of those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshc import ir
from meshc.cost.divided_work import CANNOT, COULD, SPLIT, Work, collapse_layers
from meshc.cost.flops import flops
from meshc.ir.sharding import tile_sizes
from meshc.passes.depth.blocks import counts_of
from meshc.passes.phases.factors import Instance, Token
from meshc.passes.phases.placed_model import PlacedModel
from meshc.program.instance import substitute_in_graph


def account(placed: PlacedModel) -> list[Work]:
    """One row for equal operators of equal modules, as `meshc.cost.divided_work` reads them."""
    assignment = placed.require_assignment()
    times = placed.parts.count if placed.parts is not None else 1
    axes = [axis.name for axis in placed.mesh.axes if axis.size > 1]
    found = defaultdict[tuple[str, str, str, tuple[str, ...]], float](float)
    graph = placed.graph
    standing = counts_of(placed.joint, placed.depth)
    real = graph if placed.opened is None else substitute_in_graph(graph, placed.opened.values)
    for node, sized in zip(ir.calls(graph), ir.calls(real), strict=True):
        count = flops(sized)
        if not count or node not in assignment.chosen:
            continue
        instance, chosen = assignment.factors.instances[node], assignment.chosen[node]
        taken = {axis for token_axes in chosen.values() for axis in token_axes}
        states = tuple(SPLIT if axis in taken else COULD if has_split(instance, chosen, placed.sizes) else CANNOT for axis in axes)
        record = ir.records(node)[0]
        found[(collapse_layers(record.source.module), ir.op_name(node), record.phase, states)] += count * times * standing.get(node, 1)
    return [Work(*key[:3], count, dict(zip(axes, key[3], strict=True))) for key, count in found.items()]


def with_divided(rows: Sequence[Work], divided: Mapping[tuple[str, ...], float]) -> list[Work]:
    """The same rows, where ranks along these axes divide a fraction of the whole-matrix work of updates."""
    found = []
    for row in rows:
        whole = row.phase == "update" and SPLIT not in row.by_axis.values()
        parts = divided if whole else {}
        left = 1.0 - sum(parts.values())
        if left > 1e-9:
            found.append(replace(row, flops=row.flops * left))
        for axes, part in parts.items():
            found.append(replace(row, flops=row.flops * part, by_axis={**row.by_axis, **dict.fromkeys(axes, SPLIT)}))
    return found


def has_split(instance: Instance, chosen: Mapping[Token, tuple[str, ...]], sizes: Mapping[str, int]) -> bool:
    """Whether the operator has a letter left that one more axis may split."""
    tiles = {token: tile_sizes(size, [sizes[axis] for axis in chosen.get(token, ())])[-1] for token, size in instance.size.items()}
    return any(tile > 1 for token, tile in tiles.items() if token not in instance.whole)
