"""A device with round figures, and graphs by hand."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from meshc import ir
from meshc.cost.devices import Device, Efficiency, Link
from meshc.ir import Record

F32 = torch.float32

ROUND = Device(
    "round", {"float64": 1e9, "float32": 1e12, "bfloat16": 4e12, "float16": 4e12}, 2e9, 1e9, 1e-6, 1e-6, 128,
    Link(1e-5, 1e9), Link(1e-4, 1e8), 4,
    Efficiency(flops=0.5, attention=0.25, memory=0.5),
)  # fmt: skip
"""0.5 TFLOP/s in float32, 2 in bfloat16; 1 GB/s of memory; a microsecond an operator."""


class Building:
    """A graph whose values have records."""

    def __init__(self) -> None:
        self.graph = Graph()

    def given(self, *shape: int, dtype: torch.dtype = F32) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        ir.set_record(node, Record(shape, dtype))
        return node

    def item(self, made: Node, index: int) -> Node:
        """One result of a call with several."""
        node = self.graph.call_function(operator.getitem, (made, index))
        ir.set_record(node, ir.records(made)[index])
        return node

    def call(self, target: Any, *args: Any, made: tuple[int, ...] | list[tuple[int, ...]] = (), dtype: torch.dtype | None = F32) -> Node:
        node = self.graph.call_function(target, args)
        ir.set_record(node, tuple(Record(shape, dtype) for shape in made) if isinstance(made, list) else Record(made, dtype))
        return node
