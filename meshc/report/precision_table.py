"""Table of products in few bits: what each kind of product runs in, by a kernel or emulated, and what it gains beside bfloat16.

Products of precision lines and of torch's own functions are here, and those of models that decode before they multiply (emulations do).
"""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod
from typing import Final

import torch
from torch.fx import Node

from meshc import ir
from meshc.cost import peak_memory, roofline
from meshc.cost.devices import Device
from meshc.cost.flops import is_product
from meshc.cost.scaled_products import why_emulated
from meshc.ir import spmd
from meshc.ir.schemas import named_arguments
from meshc.program.program import PlainProgram
from meshc.report.tables import seconds_text, table

ours = torch.ops.meshc
ROUNDING = tuple(
    getattr(ours, name).default
    for name in ("scale_of", "scale_in_units", "peak_of", "scale_of_history", "quantize", "quantize_by_draw", "dequantize")
)
HEADERS = ["products of", "in", "of", "times", "runs as", "takes", "in bf16"]
NAMES: Final[dict[torch.dtype | None, str]] = {
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz", torch.float8_e5m2fnuz: "e5m2fnuz",
    torch.int8: "int8",
}  # fmt: skip
SCALES: Final = {
    "meshc.scaled_mm": (2, 3), "meshc.decoded_mm": (2, 3), "meshc.decoded_grouped_mm": (2, 3),
    "aten._scaled_mm": (2, 3), "aten._scaled_mm_v2": (2, 5), "aten._scaled_grouped_mm": (2, 3),
}  # fmt: skip
"""Products of values and scales: the places of the two scales."""
DECODING: Final = frozenset(
    "_to_copy div mul t transpose permute view reshape _unsafe_view clone expand unsqueeze constant_pad_nd slice dequantize".split()
)
"""Operators between 8-bit values and a product of what they stand for."""


def precision_table(program: PlainProgram, device: Device) -> str:
    """The products of a rank in few bits, by kind: layers are one kind. "" if there are none. The last column is the time of the same
    products in bfloat16, without roundings; that of the products includes them."""
    runs = peak_memory.runs(program)
    kinds: dict[tuple[str, ...], list[tuple[Node, int]]] = defaultdict(list)
    rounding_s = 0.0
    for stage in program.stages.values():
        for node in ir.calls(stage.graph):
            if node.target in ROUNDING:
                rounding_s += runs[stage.name] * roofline.seconds(node, device)
            elif (found := _kind(node, device)) is not None:
                kinds[found].append((node, runs[stage.name]))
    if not kinds and not rounding_s:
        return ""
    rows, total_s, plain_s = [], rounding_s, 0.0
    for kind, nodes in kinds.items():
        takes = sum(times * roofline.seconds(node, device) for node, times in nodes)
        plain = sum(times * _plain_seconds(node, device) for node, times in nodes)
        rows.append((*kind[:3], str(sum(times for _, times in nodes)), kind[3], seconds_text(takes), seconds_text(plain)))
        total_s, plain_s = total_s + takes, plain_s + plain
    said = f"  scales and roundings take {seconds_text(rounding_s)}; with them" if rounding_s else "  all of them take"
    if plain_s:
        said += f" {total_s / plain_s:.2f} times what bfloat16 would take ({device.name}, predicted)"
    return table(rows, HEADERS, "products in few bits") + f"\n{said}"


def _kind(node: Node, device: Device) -> tuple[str, str, str, str] | None:
    """(modules, elements and what a scale covers, which product with its sizes on a rank, how it runs); None for one of other values."""
    if not is_product(node):
        return None
    places, given = SCALES.get(ir.op_name(node)), ir.operands(node)
    factors = given[:2] if places or ir.op_name(node) not in ("aten.addmm", "aten.baddbmm") else given[1:3]
    elements = [_element(factor, stored=places is not None) for factor in factors]
    if len(elements) != 2 or "" in elements:
        return None
    made, said = ir.records(node)[0], "/".join(dict.fromkeys(elements))
    if places is not None:
        covered = (_coverage(node, factor, node.args[place]) for factor, place in zip(factors, places, strict=True))
        said += ", " + "/".join(dict.fromkeys(covered))
        why = why_emulated(node, device)
        alone = "grouped" in ir.op_name(node) or len(ir.record(factors[0]).shape) > 2
        runs_as = f"emulated: {why}" if why else "kernel, of compute capability 9 alone" if alone else "kernel"
    else:
        runs_as = f"{str(made.dtype).removeprefix('torch.')}, once decoded"
    modules = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", made.source.module) or "the model itself"
    what = "forward" if made.phase == "forward" else "backward"
    return modules, said, f"{what}, {_sizes(node, factors)}", runs_as


def _sizes(node: Node, factors: list[Node]) -> str:
    """m x k x n; of groups, the sizes of both factors."""
    a, b = (ir.record(factor).shape for factor in factors)
    if node.target is ours.scaled_mm.default:
        named = named_arguments(node)
        summed, batch = named["summed"], named["batch"]
        a, b = (a[batch], prod(a[batch + 1 :])), (0, prod(b[batch + summed :]))
    return " x ".join(map(str, (*a, b[1]))) if len(a) == len(b) == 2 else f"{' x '.join(map(str, a))} by {' x '.join(map(str, b))}"


def _coverage(node: Node, values: Node, scale: object) -> str:
    """What one scale is for."""
    one = scale[0] if isinstance(scale, list | tuple) else scale
    assert isinstance(one, Node)
    shape, rank = ir.record(one).shape, len(ir.record(values).shape)
    if all(size == 1 for size in shape):
        return "tensor"
    if ir.op_name(node) == "meshc.scaled_mm" and named_arguments(node)["summed"] == 2:
        return f"blocks of {ir.record(ir.operands(node)[0]).shape[-1]}"
    return "blocks" if rank == len(shape) == 2 and 1 not in shape else "row"


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


def _plain_seconds(node: Node, device: Device) -> float:
    """Of the same product in bfloat16: its flops, or what it moves."""
    moved = sum(prod(ir.record(one).shape) for one in (*node.all_input_nodes[:2], node)) * torch.bfloat16.itemsize
    work = roofline.flops(node) / device.rate(torch.bfloat16)
    return max(work, moved / device.bytes_per_s) + device.launch_s
