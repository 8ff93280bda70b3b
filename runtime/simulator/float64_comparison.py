"""Programs and models in float64 for a comparison, also where code asks for float32 by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from meshc.frontend.double_copy import wider
from meshc.ir import has_record, records, set_record
from meshc.ir.functions import Function, Keywords
from meshc.ir.graph import copy_graph
from meshc.ir.nodes import KEY
from meshc.private import TorchDispatchMode
from meshc.program.program import PlainProgram


def widen_program(program: PlainProgram) -> PlainProgram:
    """The program in double precision: types, constants and dtype arguments of operators; the operators are the same."""
    ports = [tuple(replace(port, dtype=wider(port.dtype)) for port in side) for side in (program.inputs, program.outputs)]
    constants = {name: value.to(wider(value.dtype)) for name, value in program.constants.items()}
    stages = {name: replace(stage, graph=_wide(stage.graph)) for name, stage in program.stages.items()}
    return replace(program, stages=stages, inputs=ports[0], outputs=ports[1], constants=constants)


def _wide(graph: Graph) -> Graph:
    made = copy_graph(graph)
    for node in made.nodes:
        node.args, node.kwargs = map_aggregate(node.args, wider), map_aggregate(node.kwargs, wider)
        if has_record(node):
            found = tuple(replace(one, dtype=wider(one.dtype)) for one in records(node))
            set_record(node, found if isinstance(node.meta[KEY], tuple) else found[0])
    return made


class WidenedOperators(TorchDispatchMode):
    """Replaces float32 arguments inside a float64 model by float64 (Llama's norms, causal losses), as the float64 capture does."""

    def __torch_dispatch__(self, func: Function, types: object, args: Sequence[object] = (), kwargs: Keywords | None = None) -> object:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            in_runs: Function = _grouped_mm
            return in_runs(*args, **kwargs)
        if getattr(func, "namespace", "") == "meshc":  # a probability is compared with a float32 draw whatever the model's dtype
            return func(*args, **kwargs)
        if "dtype" in kwargs:
            kwargs["dtype"] = wider(kwargs["dtype"])
        return func(*map(wider, args), **kwargs)


class WidenedConstants(TorchFunctionMode):
    """The same for `torch.tensor(x, dtype=torch.float32)` (DeBERTa's scale): such a constant is created before operators are dispatched."""

    def __torch_function__(self, func: Function, types: object, args: Sequence[object] = (), kwargs: Keywords | None = None) -> object:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and "dtype" in kwargs:
            kwargs["dtype"] = wider(kwargs["dtype"])
        return func(*args, **kwargs)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """torch's grouped product in float64, which torch refuses: a matrix for each run of rows [r, k] x [g, k, n], or its gradient, products
    of runs of columns with runs of rows [k, r] x [r, n].
    """
    if offs is None or bias is not None or a.dim() != 2:
        raise NotImplementedError("grouped products in float64, other than of rows in runs against matrices, and their gradients")
    ends = [int(end) for end in offs]
    starts = [0, *ends[:-1]]
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in zip(starts, ends, strict=True)])
    rows = [a[start:end] @ matrix for start, end, matrix in zip(starts, ends, b, strict=True)]
    return torch.cat([*rows, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
