"""What a model runs under when it is compared in float64: float32 that it asks for by name, and what torch has in lower precision only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshc.frontend.capture import WIDER
from meshc.ir.functions import Function
from meshc.private import TorchDispatchMode


class Widened(TorchDispatchMode):
    """float32 asked for inside a float64 model becomes float64 (Llama's norms, causal losses): what the float64 capture does."""

    def __torch_dispatch__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **kwargs)
        if getattr(func, "namespace", "") == "meshc":  # a probability is compared with a float32 draw whatever the model's dtype
            return func(*args, **kwargs)
        if kwargs.get("dtype") in WIDER:
            kwargs["dtype"] = WIDER[kwargs["dtype"]]
        args = tuple(WIDER.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        return func(*args, **kwargs)


class WidenedConstants(TorchFunctionMode):
    """`torch.tensor(x, dtype=torch.float32)` likewise (DeBERTa's scale): such a constant is made before operators are dispatched."""

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("dtype") in WIDER:
            kwargs["dtype"] = WIDER[kwargs["dtype"]]
        return func(*args, **kwargs)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None) -> Tensor:
    """What torch's grouped product means, for the dtype that it refuses: a matrix for each run of rows [r, k] x [g, k, n], or the products
    of runs of columns with runs of rows [k, r] x [r, n] that are its gradient.
    """
    if offs is None or bias is not None or a.dim() != 2:
        raise NotImplementedError("grouped products in float64, other than of rows in runs against matrices, and their gradients")
    ends = [int(end) for end in offs]
    starts = [0, *ends[:-1]]
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in zip(starts, ends, strict=True)])
    rows = [a[start:end] @ matrix for start, end, matrix in zip(starts, ends, b, strict=True)]
    return torch.cat([*rows, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
