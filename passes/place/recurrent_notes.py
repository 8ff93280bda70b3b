"""Notes on recurrent layers that run all steps on every rank: those that stay torch's own (packed sequences, projections).

    cp: seq                  the layer's input is gathered, and each rank takes all steps of all rows
    cp: batch@lstm > seq     an all-to-all before and after the layer: each rank takes all steps of some rows

Others are `meshc::rnn`, whose state is passed from rank to rank (`partition/turn_choice.py`).
"""

from __future__ import annotations

from torch import nn
from torch.fx import Node

from meshc.cost.flops import COUNTS, flops
from meshc.ir import op_name, records
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.interests import interests


def recurrent_notes(placed: PlacedModel) -> list[str]:
    """A note for each such layer and axis."""
    layers = {name: child for name, child in placed.request.module.named_modules() if isinstance(child, nn.RNNBase)}
    if not layers:
        return []
    work: dict[tuple[str, str], float] = {}
    for name, axis, node in _idle(placed, set(layers)):
        if axis in _along_the_sequence(placed):
            work[name, axis] = work.get((name, axis), 0.0) + flops(node)
    return [
        f"{name} ({type(layers[name]).__name__}) takes one step after another: its input is gathered over {axis}, and each of "
        f"{placed.sizes[axis]} ranks takes all steps of all rows, {total / 1e9:,.3g} GFLOP forward; `{axis}: batch@{name} > seq` lets each "
        "take those of its rows"
        for (name, axis), total in work.items()
    ]


def _along_the_sequence(placed: PlacedModel) -> set[str]:
    """Axes that split the sequence in any region."""
    named = {factor for factor, names in placed.names.also.items() if "seq" in names}
    found = interests(placed.plan, placed.names, list(placed.sizes))
    return {axis for axis, one in found.items() if any(region is None for factor in named for _, region in one.ranks.get(factor, ()))}


def _idle(placed: PlacedModel, layers: set[str]) -> list[tuple[str, str, Node]]:
    """(layer, axis, product) for each axis that does not split a forward product of the layer."""
    found = []
    for node, chosen in placed.require_assignment().chosen.items():
        record = records(node)[0]
        if record.source.module in layers and record.phase == "forward" and op_name(node) in COUNTS:
            used = {axis for axes in chosen.values() for axis in axes}
            found += [(record.source.module, axis, node) for axis, size in placed.sizes.items() if size > 1 and axis not in used]
    return found
