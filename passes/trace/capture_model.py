"""Capture: the model as one torch-level graph, its open dims as symbolic sizes.

The first pass. Where layers of the model stand for others (`passes/depth/prove_depth.py`), only those are traced. A step that is the mean
of its microbatches is traced for one microbatch; the batch dims of its inputs are found from the forward of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import torch

from meshc.errors import PlanError
from meshc.frontend.admission import refuse_empty
from meshc.frontend.capture import torch_graph
from meshc.frontend.expert_capacity import rows_of
from meshc.frontend.listed_experts import formed_experts
from meshc.ir import trees
from meshc.ir.paths import input_names
from meshc.ir.sizes import Dynamic
from meshc.passes.depth.captured_names import captured_lines
from meshc.passes.depth.slice_layers import slice_layers
from meshc.passes.phases.compilation_phase import CompilationPhase, phase_fields
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.set_compute import compute_dtypes
from meshc.plan.expert_group_counts import groups_of


def capture(outset: CompilationPhase) -> TracedModel:
    ask = outset.request
    args, kwargs = ask.args, dict(ask.kwargs)
    if outset.parts is not None:
        args, kwargs = outset.parts.like_one((args, kwargs))
    dynamic, opened = _open(outset, args, kwargs)
    groups, experts = partial(groups_of, outset.plan, outset.sizes), ask.options.experts  # as many groups as the plan has
    behind = bool(outset.plan.formats)
    formed = formed_experts(ask.module, groups, experts.bound, rows_of((args, kwargs)), experts.limit, behind)
    with slice_layers(ask.module, outset.depth), formed:
        computed = compute_dtypes(ask.module, captured_lines(outset.plan.computes, outset.depth), ask)
        model = torch_graph(
            ask.module, ask.function, args, kwargs, signature=ask.signature, grad=ask.grad, autocast=ask.autocast, double=ask.double,
            dynamic=opened, numbers=ask.numbers, computed=computed,
        )  # fmt: skip
    if ask.train:
        refuse_empty(model.inputs)
    return TracedModel(**phase_fields(outset), model=model, dynamic=dynamic)


def _open(
    outset: CompilationPhase, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[Dynamic, ...], dict[str, dict[int, Dynamic]]]:
    """The symbolic sizes, and the dims of inputs that have them."""
    ask = outset.request
    dynamic = outset.opened.dims if outset.opened is not None else ask.dynamic
    if not dynamic:
        return (), {}
    if outset.parts is not None:
        raise PlanError('Options(dynamic=...) and batch_mix="mean_of_parts" do not go together yet: leave one of them out')
    names = input_names(ask.signature, args, kwargs)
    leaves = zip(names, trees.leaves((tuple(args), dict(kwargs))), strict=True)
    inputs = [(name, tuple(leaf.shape)) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    fixed = {size for tensor in (*ask.module.parameters(), *ask.module.buffers()) for size in tensor.shape}
    fixed |= {size for path, shape in inputs for dim, size in enumerate(shape) if dim not in dynamic.dims.get(path, {})}
    found = dynamic.choose_hints(inputs, fixed, prod(outset.sizes.values()))
    return tuple(found.values()), {path: {dim: found[name] for dim, name in row.items()} for path, row in dynamic.dims.items()}
