"""Compilations of one model at several input sizes: from the third on, passes start from one trace with open sizes.

    batch 8, seq 32    traced and compiled
    batch 8, seq 48    likewise: many loops have two sizes, that of the last batch is another
    batch 8, seq 64    seq differs: traced with seq open; 64 put in, and compiled from there
    batch 8, seq 96    96 put in, and compiled from there
    batch 3, seq 96    batch differs too: traced with both open; ...

Tracing takes most of the time of a compilation. The passes after it run as for a trace at the actual sizes, so each program equals the one
that is compiled by itself. Whether the trace holds for a size is decided by torch's guards (`passes/trace/put_sizes.py`); that layers left
out of it are equal is proved for each size. Sizes for which it does not hold are compiled by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Final

import torch

from meshc import environment
from meshc.errors import InputError, MeshcError
from meshc.frontend.dynamic_dims import UNBOUNDED, DynamicDims
from meshc.frontend.libraries.stock_caches import LENGTH
from meshc.ir import trees
from meshc.ir.paths import input_names
from meshc.lazy_module import LazyModule
from meshc.passes.driver.compile_program import compile_program, compile_traced, partition_traced, trace_open
from meshc.passes.pass_runner import run_passes
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.pipeline import FOLD
from meshc.passes.trace import mean_of_parts
from meshc.passes.trace.put_sizes import NotServed, put_sizes
from meshc.program.program import PlainProgram

if TYPE_CHECKING:
    from meshc.passes.driver import pass_replay
else:
    pass_replay = LazyModule("meshc.passes.driver.pass_replay")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each tensor that a call passes."""
FROM: Final = 3
"""A trace with open sizes takes twice as long as one without, so it begins with the third size."""
APART: Final = (8, 2, 1)
"""Distance of a near size, in multiples of the number of ranks; the first at which the model can be traced: tiles of tiles are even at both
sizes, or at neither. (1, 2, 8 or 16 alone serve the same sizes of nanoGPT, Llama, and GPT-2 over `cp`.)"""


class SharedTraceCompiler:
    """Compiler of the calls of one program, which may differ in sizes or otherwise."""

    def __init__(self) -> None:
        self._forms: list[_RequestFamily] = []

    def compile(self, request: Request, hook: Hook | None = None) -> tuple[PlainProgram, LoweredProgram]:
        """Like `compile_program`."""
        if not _may_share(request):
            return compile_program(request, hook)
        shapes = _shapes(request)
        form = next((one for one in self._forms if one.is_of(request)), None)
        if form is None:
            self._forms.append(form := _RequestFamily(request))
        traced = form.trace_at(request, shapes)
        if traced is not None:
            with contextlib.suppress(MeshcError):  # compiled by itself, the call gets its error with its own lines
                found = compile_traced(traced, hook, form.following)
                if found is not None:
                    return found
        return compile_program(request, hook)


class _RequestFamily:
    """Requests that differ only in sizes of their inputs."""

    def __init__(self, request: Request) -> None:
        self._like, self._leaves = _without_inputs(request), _leaves(request)
        self._seen: list[Shapes] = []
        self._open: tuple[DynamicDims, TracedModel] | None = None
        self.following: pass_replay.PassReplay | None = None
        """Replay of the passes after that trace."""
        self._refused: DynamicDims | None = None
        """Dims with which the model could not be traced; not tried again at each size."""

    def is_of(self, request: Request) -> bool:
        return self._leaves == _leaves(request) and self._like == _without_inputs(request)

    def trace_at(self, request: Request, shapes: Shapes) -> TracedModel | None:
        """The trace at the sizes of `request`; None where there is none."""
        if shapes not in self._seen and (len(self._seen) < FROM or _differing_dims([*self._seen, shapes]) != _differing_dims(self._seen)):
            self._seen.append(shapes)
        if len(self._seen) < FROM:
            return None
        try:
            return self._substitute_sizes(request, shapes)
        except (NotServed, MeshcError):
            return None

    def _substitute_sizes(self, request: Request, shapes: Shapes) -> TracedModel:
        dims = _differing_dims(self._seen)
        if any(size < 2 for name, shape in shapes for dim, size in enumerate(shape) if dim in dims.dims.get(name, {})):
            raise NotServed("tracing takes sizes below 2 apart")
        if self._open is None or self._open[0] != dims:
            if dims == self._refused:
                raise NotServed("tracing does not take these sizes open")
            self._open, self._refused = None, dims
            self._open, self._refused = (dims, trace_open(request, dims)), None
            self.following = pass_replay.PassReplay(partial(_partition_nearby, *self._open))
        try:
            sizes = dims.sizes(shapes)
        except InputError as error:
            raise NotServed(str(error)) from error
        return run_passes(FOLD, put_sizes(self._open[1], request, sizes))


def _partition_nearby(dims: DynamicDims, traced: TracedModel, left: LoweredProgram) -> LoweredProgram | None:
    """The result of `partition` at sizes near those of `left`, at which dims split as evenly; None if there is no such size."""
    request = left.request
    sizes = dims.sizes(_shapes(request))
    ranks = prod(axis.size for axis in request.mesh.axes)
    for more in (sign * times * ranks for times in APART for sign in (1, -1)):
        other = {name: size + more for name, size in sizes.items()}
        if min(other.values()) >= 2:
            with contextlib.suppress(NotServed, MeshcError):
                return partition_traced(run_passes(FOLD, put_sizes(traced, _with_sizes(request, dims, other), other)))
    return None


def _with_sizes(request: Request, dims: DynamicDims, sizes: Mapping[str, int]) -> Request:
    """`request` with inputs of other sizes, without values."""

    def resize(name: str, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = [sizes[dims.dims[name][dim]] if dim in dims.dims.get(name, {}) else size for dim, size in enumerate(leaf.shape)]
        return torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    leaves, spec = trees.flatten((request.args, dict(request.kwargs)))
    names = input_names(request.signature, request.args, request.kwargs)
    args, kwargs = trees.unflatten([resize(name, leaf) for name, leaf in zip(names, leaves, strict=True)], spec)
    return replace(request, args=args, kwargs=kwargs)


def _may_share(request: Request) -> bool:
    """Whether the sizes of `request` may be left open: not if the user leaves some open, if the trace is of a part of the batch or counts
    tokens, or if dumps or verification show the passes."""
    watched = environment.dump_folder() is not None or bool(environment.verifying())
    counts = request.options.experts.bound is not None or request.options.experts.capacity is not None
    return not (watched or counts or request.dynamic or mean_of_parts.means(request) or LENGTH in request.kwargs)


def _without_inputs(request: Request) -> Request:
    """The fields of `request` that a trace depends on, without inputs; the optimizer and storage are no part of them."""
    return replace(request, args=(), kwargs={}, optimizer=None, fixed={}, offloaded=frozenset(), owners={})


def _leaves(request: Request) -> tuple[object, ...]:
    """The properties of inputs that must be equal: their structure, and everything but the sizes of tensors."""
    leaves, spec = trees.flatten((request.args, dict(request.kwargs)))
    told = [("tensor", leaf.dtype, leaf.dim(), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return (spec, *told)


def _shapes(request: Request) -> Shapes:
    names = input_names(request.signature, request.args, request.kwargs)
    leaves = zip(names, trees.leaves((request.args, dict(request.kwargs))), strict=True)
    return tuple((name, tuple(leaf.shape)) for name, leaf in leaves if isinstance(leaf, torch.Tensor))


def _differing_dims(seen: Sequence[Shapes]) -> DynamicDims:
    """The dims that differ between calls; dims that are equal to each other in all calls share a name. A dim of size 1 stays: it
    broadcasts."""
    named: dict[tuple[int, ...], str] = {}
    dims: dict[str, dict[int, str]] = {}
    usual = [call for call in seen if not any(1 in shape for _, shape in call)] or seen
    for place, (name, shape) in enumerate(usual[0]):
        for dim in range(len(shape)):
            column = tuple(call[place][1][dim] for call in usual)
            if len(set(column)) > 1:
                dims.setdefault(name, {})[dim] = named.setdefault(column, f"size_{len(named)}")
    return DynamicDims(dims, {label: (2, UNBOUNDED) for label in named.values()})
