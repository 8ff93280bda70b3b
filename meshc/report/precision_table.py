"""Table of products in few bits: what each kind of product runs in, by a kernel or emulated, and what it gains beside bfloat16."""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod

import torch
from torch.fx import Node

from meshc import ir
from meshc.cost import peak_memory, roofline
from meshc.cost.devices import Device
from meshc.cost.scaled_products import SCALED, why_emulated
from meshc.ir.schemas import named_arguments
from meshc.program.program import PlainProgram
from meshc.report.tables import seconds_text, table

ours = torch.ops.meshc
ROUNDING = tuple(
    getattr(ours, name).default
    for name in ("scale_of", "scale_in_units", "peak_of", "scale_of_history", "quantize", "quantize_by_draw", "dequantize")
)
HEADERS = ["products of", "in", "of", "times", "runs as", "takes", "in bf16"]


def precision_table(program: PlainProgram, device: Device) -> str:
    """The products of a rank in few bits, by kind: layers are one kind. "" if there are none. The last column is the time of the same
    products in bfloat16, without roundings; that of the products includes them."""
    runs = peak_memory.runs(program)
    kinds: dict[tuple[str, ...], list[tuple[Node, int]]] = defaultdict(list)
    rounding_s = 0.0
    for stage in program.stages.values():
        for node in ir.calls(stage.graph):
            if node.target is SCALED:
                kinds[_kind(node, device)].append((node, runs[stage.name]))
            elif node.target in ROUNDING:
                rounding_s += runs[stage.name] * roofline.seconds(node, device)
    if not kinds and not rounding_s:
        return ""
    rows, total_s, plain_s = [], rounding_s, 0.0
    for kind, nodes in kinds.items():
        takes = sum(times * roofline.seconds(node, device) for node, times in nodes)
        plain = sum(times * _plain_seconds(node, device) for node, times in nodes)
        rows.append((*kind[:3], str(sum(times for _, times in nodes)), kind[3], seconds_text(takes), seconds_text(plain)))
        total_s, plain_s = total_s + takes, plain_s + plain
    said = f"  scales and roundings take {seconds_text(rounding_s)}"
    if plain_s:
        said += f"; with them {total_s / plain_s:.2f} times what bfloat16 would take ({device.name}, predicted)"
    return table(rows, HEADERS, "products in few bits") + f"\n{said}"


def _kind(node: Node, device: Device) -> tuple[str, ...]:
    """(modules, elements and what a scale covers, which product with its sizes on a rank, how it runs)."""
    named = named_arguments(node)
    a, b, scale_a, scale_b = (ir.record(named[name]) for name in ("a", "b", "scale_a", "scale_b"))
    made = ir.record(node)
    modules = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", made.source.module) or "the model itself"
    elements = "/".join(dict.fromkeys(_element(one.dtype) for one in (a, b)))
    if named["summed"] > 1:
        covers = f"blocks of {a.shape[-1]}"
    else:
        covers = "tensor" if prod(scale_a.shape) == prod(scale_b.shape) == 1 and prod(made.shape) > 1 else "row"
    what = "forward" if made.phase == "forward" else "backward"
    sizes = f"{a.shape[named['batch']]} x {prod(a.shape[named['batch'] + 1 :])} x {prod(b.shape[named['batch'] + named['summed'] :])}"
    why = why_emulated(node, device)
    return modules, f"{elements}, {covers}", f"{what}, {sizes}", f"emulated: {why}" if why else "kernel"


def _element(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("float8_").removesuffix("fn")


def _plain_seconds(node: Node, device: Device) -> float:
    """Of the same product in bfloat16: its flops, or what it moves."""
    moved = sum(prod(ir.record(one).shape) for one in (*node.all_input_nodes[:2], node)) * torch.bfloat16.itemsize
    work = roofline.flops(node) / device.rate(torch.bfloat16)
    return max(work, moved / device.bytes_per_s) + device.launch_s
