"""A model that several tests of a file compile alike is traced once in a process: for other meshes, plans and optimizers, a trace is the
same, and takes most of a small model's compilation.

Alike is what pickles alike: the function that is called, with its code and what it closes over; the module with all that it holds,
parameters, buffers and inputs by shape and type, other tensors by their values; and what torch has set. What does not pickle is traced.
A test that patches something has it traced, for it might have patched what traces, unless it says that it does not (`patches_behind`);
so has one whose passes somebody listens to.
"""

from __future__ import annotations

import inspect
import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from meshc.frontend.double_copy import WIDER
from meshc.ir import trees
from meshc.passes.driver import compile_program
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace import mean_of_parts
from meshc.plan.expert_group_counts import splits

KEPT = 6
"""Traces of a file, the last ones asked for."""
TRACE, AT_DEPTH = compile_program._trace_outset, compile_program.run_at_depth

Trace = Callable[[CompilationPhase, Hook | None], TracedModel]
Kept = OrderedDict[bytes, tuple[TracedModel, Request]]
"""With the request that holds what a key refers to."""


class _Alike(pickle.Pickler):
    """Equal bytes for what traces alike."""

    def __init__(self, file: io.BytesIO, request: Request) -> None:
        super().__init__(file)
        given = trees.leaves((tuple(request.args), dict(request.kwargs)))
        self.swapped = {id(t) for t in (*request.module.parameters(), *request.module.buffers(), *given) if isinstance(t, torch.Tensor)}
        self.seen: dict[int, int] = {}

    def persistent_id(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            number = self.seen.setdefault(id(value), len(self.seen))
            values = None if id(value) in self.swapped or value.is_meta else value.detach().numpy().tobytes()
            kind = (type(value).__qualname__, tuple(value.shape), str(value.dtype), value.requires_grad, str(value.device), value.stride())
            return number, *kind, values
        return None

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return str, (str(value),)
        if isinstance(value, types.CodeType):
            where = (value.co_filename, value.co_firstlineno)
            return tuple, ((*where, value.co_code, value.co_consts, value.co_names, value.co_freevars),)
        if isinstance(value, types.FunctionType) and "<" in value.__qualname__:
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            return tuple, ((value.__code__, cells, value.__defaults__, value.__kwdefaults__),)
        if isinstance(value, type) and "<" in value.__qualname__:
            return tuple, ((value.__module__, value.__qualname__, id(value)),)  # a request that is kept keeps it
        return NotImplemented


def _key(outset: CompilationPhase, double: bool) -> bytes | None:
    """None where nothing says what it is alike to."""
    ask = outset.request
    if outset.opened is not None:
        return None
    asked = (
        ask.module, ask.function, str(inspect.signature(ask.signature)), ask.args, dict(ask.kwargs), ask.dynamic,
        ask.grad, ask.train, ask.autocast, double,
        [*map(str, outset.plan.stage_compressions), *(ask.options.pipeline.splits or ())] if outset.plan.stage_compressions else (),
        splits(outset.plan, outset.sizes), bool(outset.plan.precisions), [*map(str, outset.plan.computes)], ask.scales_loss,
        ask.options.experts.bound, ask.options.experts.limit,
        outset.notes, outset.depth and (outset.depth.stretches, dict(outset.depth.captured)),
        (ask.microbatches, ask.inputs, ask.names, ask.mesh.axes) if mean_of_parts.means(ask) else (), ask.mesh.device_type,
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
    )  # fmt: skip
    file = io.BytesIO()
    try:
        _Alike(file, ask).dump(asked)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError):
        return None
    return file.getvalue()


def _wide(ask: Request) -> bool:
    """Whether parameters, buffers and inputs are what a copy in double precision has."""
    given = trees.leaves((tuple(ask.args), dict(ask.kwargs)))
    return not any(isinstance(t, torch.Tensor) and t.dtype in WIDER for t in (*ask.module.parameters(), *ask.module.buffers(), *given))


def _casts(traced: TracedModel) -> bool:
    """Whether the model itself casts to what a copy in double precision casts to otherwise."""
    nodes = [node for body in traced.model.module.modules() if isinstance(body, GraphModule) for node in body.graph.nodes]
    leaves: list[object] = []
    map_aggregate([(node.args, node.kwargs) for node in nodes], leaves.append)  # type: ignore[arg-type]  # which gives None
    return any(node.op == "call_method" and node.target in ("float", "cfloat") for node in nodes) or not WIDER.keys().isdisjoint(
        leaf for leaf in leaves if isinstance(leaf, torch.dtype)
    )


def _found(kept: Kept, trace: Trace, outset: CompilationPhase, hook: Hook | None) -> TracedModel:
    ask = outset.request
    key = _key(outset, ask.double)
    if key is None:
        return trace(outset, hook)
    if key not in kept and ask.double and _wide(ask):
        same = _key(outset, False)
        if same in kept and not _casts(kept[same][0]):
            key = same
    if key not in kept:
        kept[key] = (trace(outset, hook), ask)
        while len(kept) > KEPT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key][0].copy_for_request(ask)


@pytest.fixture(scope="module", autouse=True)
def traces() -> Iterator[Kept]:
    """Those of one file, whose fixtures for the whole file come after this one."""
    kept: Kept = OrderedDict()
    heard = False

    def listening(compiled: Callable[..., Any], asked: Request, hook: Hook | None) -> Any:
        nonlocal heard
        before, heard = heard, hook is not None
        try:
            return AT_DEPTH(compiled, asked, hook)
        finally:
            heard = before

    def once(outset: CompilationPhase, hook: Hook | None) -> TracedModel:
        return TRACE(outset, hook) if heard else _found(kept, TRACE, outset, hook)

    with mock.patch.multiple(compile_program, _trace_outset=once, run_at_depth=listening):
        yield kept


@pytest.fixture
def patches_behind() -> None:
    """A test that asks for this patches nothing that has a part in tracing, but what comes behind it."""


@pytest.fixture(autouse=True)
def one_trace(request: pytest.FixtureRequest, traces: Kept) -> Iterator[None]:
    """Around each test of a folder whose conftest.py has it: one that patches something has what it compiles traced."""
    if "monkeypatch" in request.fixturenames and "patches_behind" not in request.fixturenames:
        with mock.patch.multiple(compile_program, _trace_outset=TRACE, run_at_depth=AT_DEPTH):
            yield
    else:
        yield
