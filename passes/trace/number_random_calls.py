"""Number random calls: dropout, `rand` and attention with dropout get call numbers, in the order of the model.

    h = torch.nn.functional.dropout(x, 0.1)           h = dropout(x, 0.1, seed_step=seed, call=0)
    u = torch.rand_like(h)                  becomes   u = rand_like(h, seed_step=seed, call=1)

Part of `raise_ops`. How many numbers a call takes, and what replaces it, is in `meshc/ops/random_calls.py`; what is drawn under a number,
in docs/randomness.md. One device counts with the reference's own counter (`meshc/frontend/reference_random.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch.fx import Node

from meshc.errors import CompileError
from meshc.frontend.capture import SEED_STEP, TorchGraph
from meshc.frontend.sources import source_of
from meshc.ir.functions import Function, Target
from meshc.ops.multi_head import multi_head_attention
from meshc.ops.random_calls import QUIET, RAISED, REFUSED, draws
from meshc.ops.sdpa import sdpa
from meshc.passes.trace.own_results import own_result
from meshc.passes.trace.stand_ins import StandIns
from meshc.passes.trace.transformed_calls import draw_below

NUMBERED: Final[dict[Target, Function]] = {
    torch.nn.functional.scaled_dot_product_attention: sdpa,
    torch.nn.functional.multi_head_attention_forward: multi_head_attention,
}
"""Composites that draw if their dropout is on, and take the call's number."""


def number_random_calls(model: TorchGraph, stand_ins: StandIns) -> TorchGraph:
    """Edits the graph in place; `random_calls` of the result counts them. Raises CompileError for a call without definition."""
    calls = 0
    seed: Node | None = None
    for node in list(model.module.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        count = draws(node.target, node.args, node.kwargs)
        if count == 0:
            if node.target in QUIET and node not in stand_ins.transformed_nodes:
                stand_ins.replace_call(node, QUIET[node.target])
            continue
        function = RAISED.get(node.target) or NUMBERED.get(node.target)
        if function is None:
            raise _undefined_error(node)
        seed = seed or _seed(model)
        if node in stand_ins.transformed_nodes:
            calls += draw_below(node, seed, calls, count)
            continue
        stand_ins.replace_call(node, function, seed_step=seed, call=calls)
        if function in NUMBERED.values():
            own_result(node)
        calls += count
    return replace(model, random_calls=calls)


def _seed(model: TorchGraph) -> Node:
    """One graph attribute holds (seed, step); AOTAutograd turns it into an input."""
    module = model.module
    with model.fake_mode:
        module.register_buffer(SEED_STEP, torch.zeros(2, dtype=torch.int64))
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        node = module.graph.get_attr(SEED_STEP)
    node.meta["example_value"] = getattr(module, SEED_STEP)
    return node


def _undefined_error(node: Node) -> CompileError:
    why = f"\n  why: {REFUSED[node.target]}" if node.target in REFUSED else ""
    known = ", ".join(sorted({function if isinstance(function, str) else function.__name__ for function in RAISED}))
    return CompileError(
        f"{getattr(node.target, '__name__', node.target)}() at {source_of(node)} draws random numbers in a way that meshc has no "
        f"operator for.{why}\n  what to do: use one of {known}, or draw outside the model and pass the result in"
    )
