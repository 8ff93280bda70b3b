"""Refusal of sparse tensors: rules and collectives cut dense arrays only.

h = aten._to_sparse(x)          refused, with the user's line
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from meshc.errors import CaptureError
from meshc.ir import op_name, records


def refuse_sparse(graph: Graph) -> None:
    """Raises CaptureError that lists every value whose layout is not strided. Layouts are those of the trace, in `val`."""
    faults = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            faults.append(f"{op_name(node).removeprefix('aten.')} at {records(node)[0].source or 'the model itself'}: {value.layout}")
    if faults:
        raise CaptureError(
            "sparse tensors in the model, and programs compute with dense ones:\n  " + "\n  ".join(faults[:4]) + "\n  "
            "what to do: leave out to_sparse(), or make the tensor dense outside the model; products with zeros are zero"
        )
