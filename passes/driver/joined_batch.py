"""Global batch from the parts of ranks: joined along dim 0 of each input, and again along the model's batch dim where that differs.

    each rank   src i64[6, 2]                      whole   src i64[12, 2]: steps go along dim 0      then   src i64[6, 4]
    each rank   src i64[6, 2], h f32[1, 2, 16]     whole   h f32[2, 2, 16]: the model refuses it
                its part by itself: dim 1 is the batch of both                                       then   src i64[6, 4], h f32[1, 4, 16]

A model with inputs that begin with the batch is traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from meshc.errors import CaptureError, CompileError, CompilerFault, MeshcError
from meshc.ir import trees
from meshc.ir.paths import input_names
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import JoinedInputs, Request
from meshc.passes.place.batch import WrongJoinDim, refuse_other_joint

Answer = TypeVar("Answer")


def run_with_joined_batch(request: Request, run: Callable[[Request], Answer], forward: Callable[[Request], PlacedModel]) -> Answer:
    """The result of `run` for `request`, with the parts of ranks joined along the batch dim. `forward`: returns the forward graph of a
    request with its factors. Raises CompileError where the batch dim is not clear, and the errors of `run`."""
    try:
        return run(request)
    except WrongJoinDim as found:
        dims = found.dims
    except (CaptureError, CompileError) as error:
        if type(error) not in (CaptureError, CompileError, CompilerFault):  # subclasses say more, such as that no plan fits
            raise
        dims = _dims_of_part(request, forward)
        if not dims:
            raised = _with_dims(error, request)
            if raised is error:
                raise
            raise raised from error
    try:
        return run(join_along(request, dims))
    except WrongJoinDim as again:
        raise again.ambiguity_error() from None


def _with_dims(error: MeshcError, request: Request) -> MeshcError:
    """`error`; for parts with different numbers of rows, which are not traced by themselves, with the dims along which they were joined."""
    if request.joined is None or request.joined.ranks:
        return error
    dims = ", ".join(f"dim {dim} of {name}" for name, dim in request.joined.dims.items() if dim is not None)
    return type(error)(
        f"{error}\n"
        f"  with uneven_rows=True the rows of a part are counted along {dims}; if the batch is another dim, or an input has none,\n"
        '  say so: names={"src": ("seq", "batch"), "mask": ("seq", "keys")}'
    )


def _dims_of_part(request: Request, forward: Callable[[Request], PlacedModel]) -> Mapping[str, int | None]:
    """The batch dims of a rank's part, traced by itself; empty if parts were joined along them already, or if the part cannot be traced
    either. Raises CompileError where the batch is not clear."""
    joined = request.joined
    if joined is None or not joined.ranks:
        return {}
    try:
        placed = forward(join_along(request, dict.fromkeys(joined.dims)))
    except MeshcError:
        return {}
    try:
        refuse_other_joint(request, placed.names.batch)
    except WrongJoinDim as found:
        return found.dims
    return {}


def join_along(request: Request, dims: Mapping[str, int | None]) -> Request:
    """`request` with its parts joined along `dims`."""
    joined = request.joined
    assert joined is not None and joined.ranks
    leaves, spec = trees.flatten((request.args, dict(request.kwargs)))
    made = []
    for name, leaf in zip(input_names(request.signature, request.args, request.kwargs), leaves, strict=True):
        now, then = joined.dims.get(name), dims.get(name)
        if isinstance(leaf, torch.Tensor) and now != then:
            sizes = [size // joined.ranks if dim == now else size for dim, size in enumerate(leaf.shape)]
            shape = [size * joined.ranks if dim == then else size for dim, size in enumerate(sizes)]
            leaf = torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
        made.append(leaf)
    args, kwargs = trees.unflatten(made, spec)
    return replace(request, args=args, kwargs=kwargs, joined=JoinedInputs(dict(dims), joined.ranks))
