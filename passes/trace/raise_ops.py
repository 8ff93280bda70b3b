"""Raise: calls of the torch-level graph whose meaning is worth keeping whole become `meshc::` operators.

    attn = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m)
    loss = torch.nn.functional.cross_entropy(x, t)          y = torch.nn.functional.dropout(h, 0.1, True)
  becomes
    attn = sdpa(q, k, v, attn_mask=m)
    loss = cross_entropy(x, t)                              y = dropout(h, seed_step, 0, 0.1)

It works before AOTAutograd, so each composite has one node forward and one backward; recognising it afterwards would be a chase after every
backend's variant. Random calls get their number here, in the order in which the model makes them. Assumes that `capture` inlined modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from meshc.errors import CompileError
from meshc.frontend.capture import SEED_STEP, TorchGraph, source_of
from meshc.ir.functions import Function, Target
from meshc.ops import grouped
from meshc.ops.attention import sdpa
from meshc.ops.bags import embedding_bag
from meshc.ops.multi_head import multi_head_attention
from meshc.ops.random_calls import QUIET, RAISED, REFUSED, draws
from meshc.ops.take import cross_entropy, raised_one_hot
from meshc.ops.upsample import interpolate
from meshc.passes.phases.traced import Traced
from meshc.passes.trace.raise_flex import FLEX, raise_flex
from meshc.private import OpOverload

functional = torch.nn.functional
COMPOSITES: dict[Any, Function] = {
    functional.scaled_dot_product_attention: sdpa,
    functional.cross_entropy: cross_entropy,
    functional.embedding_bag: embedding_bag,
    functional.one_hot: raised_one_hot,
    functional.multi_head_attention_forward: multi_head_attention,
    functional.interpolate: interpolate,
    **grouped.RAISED,
}
SPARSE: dict[Any, tuple[str, int]] = {
    functional.embedding: ("sparse", 6),
    torch.embedding: ("sparse", 4),
    functional.embedding_bag: ("sparse", 7),
    torch.gather: ("sparse_grad", 3),
    "gather": ("sparse_grad", 3),
}
"""Calls that can be asked for a sparse gradient: the argument's name, and its place. A program's gradients are dense, and equal."""
NUMBERED = (sdpa, multi_head_attention)
"""Composites that draw if their dropout is on, and take the number of the call."""


def raise_ops(traced: Traced) -> Traced:
    """Replaces the targets; `random_calls` of the model counts the random ones."""
    model, notes = traced.model, list[str]()
    module = model.module
    calls = 0
    seed: Node | None = None
    for node in list(module.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target is FLEX:
            raise_flex(module, node)
            continue
        if node.target in SPARSE:
            notes += _dense(node)
        count = draws(node.target, node.args, node.kwargs)
        node.target = _composite(node.target)
        if count == 0:
            node.target = QUIET.get(node.target, node.target)
            continue
        if node.target not in RAISED and node.target not in NUMBERED:
            raise _undefined(node)
        seed = seed or _seed(model)
        node.target = RAISED.get(node.target, node.target)
        node.op = "call_function"  # a method's tensor is its first argument
        node.kwargs = {**node.kwargs, "seed_step": seed, "call": calls}
        calls += count
    module.recompile()
    return replace(traced, model=replace(model, random_calls=calls, notes=(*model.notes, *notes)))


def _dense(node: Node) -> list[str]:
    """Takes back that a gradient shall be sparse; says so."""
    name, place = SPARSE[node.target]
    if node.kwargs.get(name) or (len(node.args) > place and node.args[place]):
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}
        node.args = tuple(False if index == place else argument for index, argument in enumerate(node.args))
        return [f"{source_of(node)}: {name}=True asks for a sparse gradient, which is dense in a program, and equal"]
    return []


def _composite(target: Target) -> Any:
    """What stands for a target, itself if nothing does."""
    name = target.name() if isinstance(target, OpOverload) else getattr(target, "_qualified_op_name", "")
    return COMPOSITES.get(target) or grouped.NAMED.get(name, target)


def _undefined(node: Node) -> CompileError:
    why = f"\n  why: {REFUSED[node.target]}" if node.target in REFUSED else ""
    known = ", ".join(sorted({function if isinstance(function, str) else function.__name__ for function in RAISED}))
    return CompileError(
        f"{getattr(node.target, '__name__', node.target)}() at {source_of(node)} draws random numbers in a way that meshc has no "
        f"operator for.{why}\n  what to do: use one of {known}, or draw outside the model and pass the result in"
    )


def _seed(traced: TorchGraph) -> Node:
    """One graph attribute holds (seed, step); AOTAutograd turns it into an input."""
    module = traced.module
    with traced.fake_mode:
        module.register_buffer(SEED_STEP, torch.zeros(2, dtype=torch.int64))
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        node = module.graph.get_attr(SEED_STEP)
    node.meta["example_value"] = getattr(module, SEED_STEP)
    return node
