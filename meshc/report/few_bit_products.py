"""Table of a program's products of 8-bit values: which values, what a scale is for, whether a kernel multiplies them or float32 does.

    products of 8-bit values
      values         scales for    multiplied in              count    in
      -------------  ------------  -----------------------  -------  -----------------
      e4m3 and e4m3  a row         8 bits, made bfloat16         14  layers.*.q_proj, ..
      e5m2 and e4m3  a tensor      float32, once decoded         14  layers.*.q_proj, ..

Products of a precision line and of torch's own functions are here, and those of models that decode before they multiply (emulations do).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import torch
from torch.fx import Node

from meshc import ir
from meshc.cost.divided_work import collapse_layers
from meshc.cost.flops import is_product
from meshc.ir import spmd
from meshc.program.program import PlainProgram
from meshc.report.tables import table

NAMES: Final[dict[torch.dtype | None, str]] = {
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz", torch.float8_e5m2fnuz: "e5m2fnuz",
    torch.int8: "int8",
}  # fmt: skip
SHOWN: Final = 3
"""Number of modules that a row names."""
SCALED: Final = {
    "meshc.decoded_mm": (2, 3), "meshc.decoded_grouped_mm": (2, 3),
    "aten._scaled_mm": (2, 3), "aten._scaled_mm_v2": (2, 5), "aten._scaled_grouped_mm": (2, 3),
}  # fmt: skip
"""Products of values and scales: the places of the two scales."""
DECODING: Final = frozenset(
    "_to_copy div mul t transpose permute view reshape _unsafe_view clone expand unsqueeze constant_pad_nd slice dequantize".split()
)
"""Operators between 8-bit values and a product of what they stand for."""


def few_bit_products(program: PlainProgram) -> str:
    """The table; "" if there is no such product."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for stage in program.stages.values():
        for node in ir.calls(stage.graph):
            row = _row(node)
            if row is not None:
                found[row].append(collapse_layers(ir.records(node)[0].source.module))
    rows = []
    for row, modules in sorted(found.items()):
        named = list(dict.fromkeys(filter(None, modules)))
        rows.append((*row, len(modules), ", ".join(named[:SHOWN]) + ", .." * (len(named) > SHOWN)))
    return table(rows, ["values", "scales for", "multiplied in", "count", "in"], "products of 8-bit values") if rows else ""


def _row(node: Node) -> tuple[str, str, str] | None:
    """What a product is of, what its scales are for, and in what it is computed; None for one of other values."""
    if not is_product(node):
        return None
    places = SCALED.get(ir.op_name(node))
    factors = ir.operands(node)[:2] if places else ir.operands(node)[-2:]
    kinds = [_element(factor, stored=places is not None) for factor in factors]
    if len(kinds) != 2 or "" in kinds:
        return None
    values, result = " and ".join(kinds), str(ir.record(node).dtype).removeprefix("torch.")
    if places is None:
        return values, "", f"{result}, once decoded"
    covered = dict.fromkeys(_coverage(node, factor, node.args[place]) for factor, place in zip(factors, places, strict=True))
    return values, " and ".join(covered), f"8 bits, made {result}"


def _coverage(node: Node, values: Node, scale: object) -> str:
    """What one scale is for."""
    one = scale[0] if isinstance(scale, list | tuple) else scale
    assert isinstance(one, Node)
    shape, rank = ir.record(one).shape, len(ir.record(values).shape)
    if all(size == 1 for size in shape):
        return "a tensor"
    in_blocks = ir.op_name(node) == "meshc.scaled_mm" and node.args[5:6] == (2,) or rank == len(shape) == 2 and 1 not in shape
    return "a block" if in_blocks else "a row"


def _element(x: Node, stored: bool) -> str:
    """The type of the 8-bit values that a factor is made of, by moves and decoding; "" if it is of none. `stored`: it is such values
    itself, whose type is narrower where few of them are used (e2m1)."""
    found = NAMES.get(ir.record(x).dtype, "")
    while x.op == "call_function" and ir.is_tensor(x):
        name = ir.op_name(x).partition(".")[2].partition(".")[0]
        if name in ("quantize", "quantize_by_draw"):
            return str(x.args[2])
        if ir.record(x).dtype in NAMES and not stored:
            return NAMES[ir.record(x).dtype]
        given = ir.operands(x)
        if not given or name not in DECODING and not spmd.is_collective(x.target):
            return found
        x = given[0]
    return NAMES.get(ir.record(x).dtype, "") if ir.is_tensor(x) and not stored else found
