"""Double-precision trace of a model, for `verify(dtype=torch.float64)`: dtypes, default dtype and norms in the trace, widened casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from meshc.frontend.sources import bodies_of
from meshc.replacements import replace_targets

WIDER: Final = {torch.float32: torch.float64, torch.complex64: torch.complex128}
"""dtype -> its dtype in a copy in double precision; all others stay as they are."""


def wide_dtype(dtype: torch.dtype, double: bool) -> torch.dtype:
    """The dtype that stands for `dtype` in the copy, with `double`; else `dtype` itself."""
    return WIDER.get(dtype, dtype) if double else dtype


def wider(value: Any) -> Any:
    """A value; of a dtype that which stands for it in the copy."""
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextmanager
def double_by_default(double: bool) -> Iterator[None]:
    """A context in which tensors without a given dtype (`torch.eye(4)`, `torch.tensor(0.5)`) are double, as in the copy; and so is a norm
    with dtype float32, which torch refuses for double operands."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(wide_dtype(before, double))
    try:
        with _wide_norms() if double else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def _wide_norms() -> AbstractContextManager[None]:
    from meshc.private import FakeTensorMode

    dispatch = FakeTensorMode.dispatch

    def dispatch_wide(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.linalg_vector_norm.default and (said := (kwargs or {}).get("dtype")) is not None:
            kwargs = {**kwargs, "dtype": WIDER.get(said, said)}
        return dispatch(self, func, types, args, kwargs)

    return replace_targets(fake_dispatch=dispatch_wide)


def widen_casts(module: torch.fx.GraphModule) -> None:
    """Casts to float32 inside the model become casts to float64, complex64 likewise, so that `verify(dtype=torch.float64)` compares in
    double throughout."""

    for body in bodies_of(module):
        for node in body.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, wider)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, wider)
            if node.op == "call_method":
                node.target = {"float": "double", "cfloat": "cdouble"}.get(node.target, node.target)
        body.recompile()
