"""Scalar reads of a compiled model's DTensors: returned where the value is whole on every rank, refused where a rank has a part.

    p.grad.norm().item()      a partial norm: torch would return this rank's summand
    p.tolist(), np.asarray(p), f"{norm:.3f}"        torch refuses these on any DTensor, whole or not

A whole value takes an exchange between ranks, which belongs in a line that every rank runs: `x.full_tensor()`. A boolean of which ranks
have parts (`if torch.isnan(p.grad).any()`) is gathered at once: all ranks must branch on the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshc.errors import StateError
from meshc.private import OpOverload
from meshc.replacements import replace_for_good
from meshc.runtime.state.views import by_torch, is_of_model, register_handler

_NAMES: Final = {"numpy": "dtensor_numpy", "tolist": "dtensor_list", "__format__": "dtensor_text"}
"""Methods of a tensor that torch's DTensor refuses -> their names among the replacements."""


def follow() -> None:
    """Installs these rules for reads of DTensors."""
    register_handler(torch.ops.aten._local_scalar_dense.default, _number)
    for name, target in _NAMES.items():
        if name not in vars(DTensor):
            replace_for_good(target, _method(name, getattr(DTensor, name)))


def _number(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handler of `item()`, `float`, `int` and `bool` of a DTensor."""
    value = args[0]
    if not is_of_model(value) or not _apart(value):
        return by_torch(op, args, kwargs)
    if value.dtype is torch.bool:
        return bool(value.full_tensor())
    _refuse_part(value, "item()")
    return None


def _method(name: str, by_class: Callable[..., Any]) -> Callable[..., Any]:
    def read_whole(value: DTensor, *args: Any, **kwargs: Any) -> Any:
        if not is_of_model(value) or (name == "__format__" and (value.dim() or not args[0])):
            return by_class(value, *args, **kwargs)
        _refuse_part(value, "item()" if name == "__format__" else f"{name}()")
        local = value.to_local()
        return getattr(local.detach() if name != "numpy" else local, name)(*args, **kwargs)

    read_whole.__name__, read_whole.__doc__ = name, getattr(Tensor, name).__doc__
    return read_whole


def _refuse_part(value: DTensor, call: str) -> None:
    if apart := _apart(value):
        what = f"a DTensor of shape {list(value.shape)}" if value.dim() else "a number"
        raise StateError(
            f"{call} was asked of {what} of which this rank has a part: {', '.join(apart)}\n"
            f"  why: the part would be taken for the whole, and each rank would read another value\n"
            f"  what to do: .full_tensor().{call} in its place, on every rank, since ranks exchange their parts for it"
        )


def _apart(value: DTensor) -> list[str]:
    """Placements of a tensor that is not replicated, as text by axis; empty if it is replicated."""
    mesh = value.device_mesh
    rows = zip(value.placements, mesh.shape, mesh.mesh_dim_names or (), strict=True)
    return [f"{place} over {axis}" for place, size, axis in rows if size > 1 and not isinstance(place, Replicate)]
