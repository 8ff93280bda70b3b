"""`operator`: registers a function as an operator of meshc, with the check of its operands and the shapes of its results said once.

    @operator("cumsum_back", results="x", fit=_fit)            a result like x; _fit(x, dim) raises for operands that do not fit
    def cumsum_back(x: Tensor, dim: int) -> Tensor:

The check runs before real and fake calls alike: kernels index memory by the sizes of one operand (`operands.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from meshc.ir.functions import Function
from meshc.private import OpOverload

Results = str | Callable[..., Any]
"""Names of operands that the results are like, one for each; or a function of the operator's arguments to empty tensors."""

PLAIN: Final[dict[OpOverload, Function]] = {}
"""Operator -> its function, with the check, for calls on plain tensors."""

_LIBRARY: Final = torch.library.Library("meshc", "FRAGMENT")


def operator(
    name: str, results: Results, fit: Callable[..., None] | None = None, schema: str | None = None
) -> Callable[[Function], torch.library.CustomOpDef]:
    """A decorator that registers `meshc::name`. `fit`: of the operator's arguments, raises for operands that do not fit together.
    `schema`: where the function's own annotations do not say it."""

    def register(function: Function) -> torch.library.CustomOpDef:
        empty = _like(function, results.split()) if isinstance(results, str) else results

        def check_and_call(*args: Any, **kwargs: Any) -> Any:
            if fit is not None:
                fit(*args, **kwargs)
            return function(*args, **kwargs)

        def fake(*args: Any, **kwargs: Any) -> Any:
            if fit is not None:
                fit(*args, **kwargs)
            return empty(*args, **kwargs)

        called = check_and_call if fit is not None else function
        said = schema or torch.library.infer_schema(function, mutates_args=())
        made = torch.library.custom_op(f"meshc::{name}", called, mutates_args=(), schema=said)
        made.register_fake(fake)
        PLAIN[made._opoverload] = called
        return made

    return register


def register_kernel(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an operator of lists, or one that writes into operands, by its schema: `name(...) -> ...`."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshc::{name}", fake, lib=_LIBRARY)


def _like(function: Function, names: list[str]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Empty contiguous tensors of the shapes of these operands."""
    order = [*inspect.signature(function).parameters]

    def empty(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        given = dict(zip(order, args, strict=False)) | kwargs
        made = tuple(given[name].new_empty(given[name].shape) for name in names)
        return made if len(made) > 1 else made[0]

    return empty
