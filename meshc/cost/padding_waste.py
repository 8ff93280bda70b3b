"""Cost of padding: for each factor that its axes do not divide, the share of its tiles that is padding.

    vocab 257 over tp=8: tiles of 33, 264 in all, of which 7 are padding (2.7 %)

A rank's figures are averages over the ranks. A value with two padded factors counts for each as if the other had none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch.fx import Node

from meshc import ir
from meshc.cost import peak_memory
from meshc.cost.flops import flops
from meshc.ir.sharding import Part, Sharding, local_size, padded_parts
from meshc.program.program import PlainProgram


@dataclass(frozen=True)
class Padding:
    """One factor on its axes.

    tile           positions on each rank, padding included
    share          share of all tiles' positions that is padding
    kept_bytes     bytes of padding in values that are live for the whole call (parameters, optimizer state, buffers, inputs)
    compute_share  share of the arithmetic of all ranks that is spent on padding
    """

    factor: str
    size: int
    axes: tuple[str, ...]
    tile: int
    share: float
    kept_bytes: float
    compute_share: float


def padding(program: PlainProgram) -> list[Padding]:
    """Every padded factor, largest share of the arithmetic first."""
    sizes = program.axis_sizes
    kept: dict[Part, float] = defaultdict(float)
    for port in program.inputs:
        if port.kind in peak_memory.KEPT and port.sharding is not None:
            for part in _padded_parts(port.sharding, sizes):
                kept[part] += peak_memory.port_bytes(port, sizes) * _share(part, sizes)
    work: dict[Part, float] = defaultdict(float)
    done, times = 0.0, peak_memory.runs(program)
    for stage in program.stages.values():
        for node in ir.calls(stage.graph):
            count = flops(node) * times[stage.name]
            done += count
            for part in _operator_padding(node, sizes) if count else ():
                work[part] += count * _share(part, sizes)
    found = [
        Padding(part.factor, part.size, part.axes, local_size(part, sizes), _share(part, sizes), kept[part], work[part] / max(done, 1.0))
        for part in dict.fromkeys([*kept, *work])
    ]
    return sorted(found, key=lambda row: (-row.compute_share, -row.kept_bytes, row.factor, row.axes))


def _padded_parts(sharding: Sharding, sizes: Mapping[str, int]) -> list[Part]:
    return list(dict.fromkeys(part for _, _, part in padded_parts(sharding, sizes)))


def _operator_padding(node: Node, sizes: Mapping[str, int]) -> list[Part]:
    """Padded parts of an operator's operands and results, one per letter of its rule."""
    values = [*(found for operand in node.all_input_nodes for found in _shardings(operand)), *_shardings(node, True)]
    values += [found for user in node.users if ir.is_getitem(user) for found in _shardings(user, True)]
    return list(dict.fromkeys(part for sharding in values for part in _padded_parts(sharding, sizes)))


def _shardings(node: Node, own: bool = False) -> list[Sharding]:
    """Shardings of a node's results; if none is recorded (a mask before its reader) and not `own`, those of its operands."""
    found = [record.sharding for record in ir.records(node) if record.sharding is not None]
    if found or own:
        return found
    return [sharding for operand in node.all_input_nodes for sharding in _shardings(operand)]


def _share(part: Part, sizes: Mapping[str, int]) -> float:
    tiles = local_size(part, sizes) * prod(sizes[axis] for axis in part.axes)
    return 1 - part.size / tiles
