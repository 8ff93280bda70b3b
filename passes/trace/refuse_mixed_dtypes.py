"""Refusal of products whose operands differ in dtype: kernels refuse them, fake tensors do not, so a program would fail at its first call.

mm(x: f64[4, 8], t: f32[8, 4])         refused, with the user's line: torch takes one dtype on both sides
"""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.errors import CaptureError
from meshc.ir import op_name, operands, records, value_of

aten = torch.ops.aten

PRODUCTS: Final = frozenset(getattr(aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "mv", "dot"))
"""Products that torch computes in one dtype, summands included."""


def refuse_mixed(graph: Graph) -> None:
    """Raises CaptureError that lists every forward product of several dtypes."""
    faults = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in PRODUCTS or records(node)[0].phase != "forward":
            continue
        given = [_dtype_and_shape(operand) for operand in operands(node)]
        if len({dtype for dtype, _ in given}) > 1:
            said = " and ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for dtype, shape in given)
            faults.append(f"{op_name(node).removeprefix('aten.')} at {str(records(node)[0].source) or 'the model itself'}: {said}")
    if faults:
        raise CaptureError(
            "products of different dtypes, which torch does not compute:\n  " + "\n  ".join(faults[:4]) + "\n  "
            "what to do: pass inputs of the parameters' dtype, cast (x.to(self.weight.dtype)), or compile under torch.autocast"
        )


def _dtype_and_shape(operand: Node) -> tuple[torch.dtype | None, list[int]]:
    node, index = value_of(operand)
    found = records(node)[index]
    return found.dtype, list(found.shape)
