"""Faults of readers of values with used rows alone (`meshc/ir/used_rows_dims.py`): a reader must treat each row by itself.

    h: "f32[1, 8, 4] used(1)" = meshc.rows_of_tokens(x, used, 2)
    y: "f32[1, 8, 4]" = aten.silu(h)                                refused: there are fewer than 8 rows
    s: "f32[4]" = aten.sum.dim_IntList(h, [0, 1])                   refused: a sum over rows
    z: "f32[1, 8, 4] used(1)" = all_reduce(h, ["tp"], "sum")        refused: a collective
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from torch.fx import Node

from meshc import ir
from meshc.ir import used_rows_dims
from meshc.ir.keys import Kind, is_a
from meshc.ir.regions import region_of
from meshc.program.program import Stage
from meshc.text.allowed_operators import spelling

MAY: Final[tuple[Kind, ...]] = ("flow", "saved")
"""Kinds of keys under which a value of used rows may pass from stage to stage of one rank."""


def faults(stage: Stage, sent: Collection[str]) -> Iterator[tuple[str, str]]:
    """(value, message) for every fault; `sent`: keys of values sent to other ranks. Assumes lines with correct types."""
    keys = stage.keys()
    for node in stage.graph.nodes:
        if node.op == "call_function" and (why := used_rows_dims.fault(node)):
            yield node.name, f"{node.name} = {spelling(node.target)}(...): {why}"
        elif used_rows_dims.dim_of(node) is not None and region_of(node) is not None:
            yield node.name, f"{node.name} = {spelling(node.target)}(...): what is compiled has all rows of what it makes"
        if node.op == "placeholder" and used_rows_dims.dim_of(node) is not None and not is_a(keys[node], *MAY):
            yield node.name, f"the parameter {node.name}: of {keys[node]} all rows are there"
    for key, value in stage.results().items():
        leaves = key in sent or not is_a(key, *MAY)
        if leaves and isinstance(value, Node) and ir.has_record(value) and used_rows_dims.dim_of(value) is not None:
            yield f"return {key}", f"{key} leaves as {value}, of which the used rows alone are there"
