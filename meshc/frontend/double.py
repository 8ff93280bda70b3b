"""A traced model in double precision, which `verify(dtype=torch.float64)` compares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

WIDER: Final = {torch.float32: torch.float64, torch.complex64: torch.complex128}
"""What a copy in double precision has for each dtype; others stay as they are."""


def wide(dtype: torch.dtype, double: bool) -> torch.dtype:
    """What stands for a dtype; itself, unless it is a copy in double precision."""
    return WIDER.get(dtype, dtype) if double else dtype


def is_beyond_single(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call fills a tensor, of which nothing says the dtype, with a number that single precision does not have: the least that
    a copy in double precision has, where the model asked for the least of its own."""
    number = kwargs.get("fill_value", args[1] if len(args) > 1 else None)
    if target not in (torch.full, torch.ops.aten.full.default) or kwargs.get("dtype") is not None or not isinstance(number, float):
        return False
    return math.isfinite(number) and abs(number) > torch.finfo(torch.float32).max


def widen(module: torch.fx.GraphModule) -> None:
    """Casts to float32 inside the model become casts to float64, complex64 likewise: what `verify(dtype=torch.float64)` compares is so
    throughout."""

    def wider(argument: object) -> Any:
        return WIDER.get(argument, argument) if isinstance(argument, torch.dtype) else argument

    for body in [child for child in module.modules() if isinstance(child, torch.fx.GraphModule)]:  # itself, and checkpointed regions
        for node in body.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, wider)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, wider)
            if is_beyond_single(node.target, node.args, node.kwargs):
                node.kwargs = {**node.kwargs, "dtype": torch.float64}
            if node.op == "call_method":
                node.target = {"float": "double", "cfloat": "cdouble"}.get(node.target, node.target)
        body.recompile()
