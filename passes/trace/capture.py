"""Capture: the model as one torch-level graph, its open dims as sizes.

The first pass. A step that is the mean of its microbatches is traced for one of them; which dims of its inputs are the batch is read off
the forward of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshc.errors import PlanError
from meshc.frontend.admission import refuse_empty
from meshc.frontend.capture import torch_graph
from meshc.ir.paths import input_names
from meshc.ir.sizes import Dynamic
from meshc.passes.phases.draft import Draft, Request
from meshc.passes.trace import parts


def capture(draft: Draft, forward: Callable[[Request], Draft]) -> Draft:
    """forward: the graph of a whole batch's forward, with its factors"""
    ask = draft.request
    args, kwargs = ask.args, dict(ask.kwargs)
    if parts.means(ask):
        draft.parts = parts.find_parts(forward(ask), ask)
        args, kwargs = draft.parts.like_one((args, kwargs))
    opened = _open(draft, args, kwargs)
    traced = torch_graph(
        ask.module, ask.function, args, kwargs, signature=ask.signature, grad=ask.grad, autocast=ask.autocast, double=ask.double,
        dynamic=opened,
    )  # fmt: skip
    if ask.train:
        refuse_empty(traced.inputs)
    draft.traced, draft.output_tree = traced, traced.output_tree
    draft.cache_outputs = traced.output_tree.caches()
    return draft


def _open(draft: Draft, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, dict[int, Dynamic]]:
    """The dims of inputs that are left open, each with its size."""
    ask = draft.request
    dynamic = draft.opened.dims if draft.opened is not None else ask.dynamic
    if not dynamic:
        return {}
    if draft.parts is not None:
        raise PlanError('Options(dynamic=...) and batch_mix="mean_of_parts" do not go together yet: leave one of them out')
    names = input_names(ask.signature, args, kwargs)
    leaves = zip(names, pytree.tree_leaves((tuple(args), dict(kwargs))), strict=True)
    inputs = [(name, tuple(leaf.shape)) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    fixed = {size for tensor in (*ask.module.parameters(), *ask.module.buffers()) for size in tensor.shape}
    for path, shape in inputs:
        fixed |= {size for dim, size in enumerate(shape) if dim not in dynamic.dims.get(path, {})}
    pieces = prod(draft.sizes.values())
    found = dynamic.settled(inputs, fixed, pieces)
    draft.dynamic = tuple(found.values())
    return {path: {dim: found[name] for dim, name in row.items()} for path, row in dynamic.dims.items()}
