"""Dtypes in which modules compute, beside those of their parameters: parameters as the modules see them, and casts of what goes in.

    precision layers.*: compute bf16          layers.0.weight is bfloat16 inside, and so are the floating-point inputs of layers.0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ComputeDtypes:
    """
    parameters  by name, the dtype in which its modules see it
    sums        by name, the dtype in which its gradient is summed over ranks, where that is another one
    inputs      by path of a module, the dtype to which what goes into it is cast: the outermost modules of a line
    """

    parameters: Mapping[str, torch.dtype] = field(default_factory=dict)
    sums: Mapping[str, torch.dtype] = field(default_factory=dict)
    inputs: Mapping[str, torch.dtype] = field(default_factory=dict)


AS_STORED: Final = ComputeDtypes()


@contextmanager
def cast_inputs(module: nn.Module, inputs: Mapping[str, torch.dtype]) -> Iterator[None]:
    """A context in which floating-point tensors that go into submodules are cast, as FSDP2 casts them (`cast_forward_inputs`)."""
    with ExitStack() as stack:
        for path, dtype in inputs.items():
            hook = partial(_cast_arguments, dtype)
            stack.callback(module.get_submodule(path).register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
        yield


def _cast_arguments(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _cast(dtype, args), _cast(dtype, kwargs)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """By hand, since the hook is traced."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_cast(dtype, one) for one in value])
    if type(value) in (list, tuple):
        return type(value)([_cast(dtype, one) for one in value])
    return {name: _cast(dtype, one) for name, one in value.items()} if type(value) is dict else value
