"""A traced model in double precision, which `verify(dtype=torch.float64)` compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import torch

WIDER: Final = {torch.float32: torch.float64, torch.complex64: torch.complex128}
"""What a copy in double precision has for each dtype; others stay as they are."""


def wide(dtype: torch.dtype, double: bool) -> torch.dtype:
    """What stands for a dtype; itself, unless it is a copy in double precision."""
    return WIDER.get(dtype, dtype) if double else dtype


@contextmanager
def double_by_default(double: bool) -> Iterator[None]:
    """Inside, what nobody says the dtype of (`torch.eye(4)`, `torch.tensor(0.5)`) is double, as the copy that makes it; and a norm in
    float32, which torch refuses of what is double."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(wide(before, double))
    try:
        with _wide_norms() if double else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _wide_norms() -> Iterator[None]:
    from meshc.private import FakeTensorMode

    dispatch = FakeTensorMode.dispatch

    def dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.linalg_vector_norm.default and (said := (kwargs or {}).get("dtype")) is not None:
            kwargs = {**kwargs, "dtype": WIDER.get(said, said)}
        return dispatch(self, func, types, args, kwargs)

    with mock.patch.object(FakeTensorMode, "dispatch", dispatched):
        yield


def widen(module: torch.fx.GraphModule) -> None:
    """Casts to float32 inside the model become casts to float64, complex64 likewise: what `verify(dtype=torch.float64)` compares is so
    throughout."""

    def wider(argument: object) -> Any:
        return WIDER.get(argument, argument) if isinstance(argument, torch.dtype) else argument

    for body in [child for child in module.modules() if isinstance(child, torch.fx.GraphModule)]:  # itself, and checkpointed regions
        for node in body.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, wider)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, wider)
            if node.op == "call_method":
                node.target = {"float": "double", "cfloat": "cdouble"}.get(node.target, node.target)
        body.recompile()
