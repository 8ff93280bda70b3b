"""Raise: calls of the torch-level graph that are worth keeping whole, as `meshc::` operators.

    attn = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m)
    loss = torch.nn.functional.cross_entropy(x, t)          y = torch.nn.functional.dropout(h, 0.1, True)
  becomes
    attn = sdpa(q, k, v, attn_mask=m)
    loss = cross_entropy(x, t)                              y = dropout(h, seed_step, 0, 0.1)

Runs before AOTAutograd, so each composite has one node forward and one backward; afterwards, every backend's variant would have to be
recognised. Random calls get their number first (`raise_ops.py`). Assumes that `capture` inlined modules.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshc.errors import CompileError
from meshc.frontend.capture import SEED_STEP, TorchGraph
from meshc.frontend.inner_transforms import below_wrappers
from meshc.frontend.reference_random import ReferenceRandom, Tile
from meshc.frontend.sources import source_of
from meshc.ir.functions import Function, Target
from meshc.ops import grouped_mm, recurrent
from meshc.ops.as_strided import as_strided, fill_diagonal
from meshc.ops.bags import embedding_bag
from meshc.ops.multi_head import multi_head_attention
from meshc.ops.random_calls import QUIET, RAISED, REFUSED, draws
from meshc.ops.sdpa import sdpa
from meshc.ops.signatures import bind_arguments
from meshc.ops.take import cross_entropy, raised_one_hot
from meshc.ops.upsample import interpolate
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.chains import READ
from meshc.passes.trace.raise_flex import FLEX, raise_flex
from meshc.passes.trace.raise_written_out import raise_written_out
from meshc.passes.trace.stand_ins import StandIns, own_result, read_by_place
from meshc.private import OpOverload

functional = torch.nn.functional
COMPOSITES: dict[Target, Function] = {
    functional.scaled_dot_product_attention: sdpa,
    functional.cross_entropy: cross_entropy,
    functional.embedding_bag: embedding_bag,
    functional.one_hot: raised_one_hot,
    functional.multi_head_attention_forward: multi_head_attention,
    functional.interpolate: interpolate,
    torch.as_strided: as_strided,
    "as_strided": as_strided,
    "fill_diagonal_": fill_diagonal,
    **grouped_mm.RAISED,
    **recurrent.RAISED,
}
ALIASES = (as_strided, fill_diagonal)
"""Functions whose result shares memory with an operand: a view that is written through, and a write in place."""
SPARSE: dict[Target, str] = {
    functional.embedding: "sparse",
    torch.embedding: "sparse",
    functional.embedding_bag: "sparse",
    torch.gather: "sparse_grad",
    "gather": "sparse_grad",
}
"""Calls that can return a sparse gradient -> the argument that requests it. A program's gradients are dense, and equal."""


def raise_ops(traced: TracedModel) -> TracedModel:
    """Replaces the model's calls."""
    return replace(traced, model=raise_graph(traced.model))


def raise_graph(model: TorchGraph) -> TorchGraph:
    """The same for any torch-level graph, in place."""
    stand_ins = StandIns(model)
    for node in model.module.graph.nodes:
        if node.kwargs and node.target in READ:
            read_by_place(node)
    model = number_random_calls(model, stand_ins)
    module, notes = model.module, list[str]()
    raise_written_out(module, stand_ins)
    raise_masked_writes(module)
    for node in list(module.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target is FLEX:
            raise_flex(module, node)
            stand_ins.compare(node)
            continue
        if node.target in SPARSE:
            notes += _dense(node)
        if node in stand_ins.transformed_nodes:
            if node.target in NUMBERED:  # an attention, which draws nothing by now
                node.op, node.target = "call_function", _written_out(node.target)
            continue
        name = node.target.name() if isinstance(node.target, OpOverload) else getattr(node.target, "_qualified_op_name", "")
        composite = COMPOSITES.get(node.target) or grouped_mm.NAMED.get(name)
        if composite is not None:
            stand_ins.replace_call(node, composite)
            if composite not in ALIASES:
                own_result(node)
    module.recompile()
    return replace(model, notes=(*model.notes, *notes))


def _dense(node: Node) -> list[str]:
    """Removes the request of a sparse gradient; returns a note."""
    name = SPARSE[node.target]
    named = bind_arguments(node.target, node.args, node.kwargs)
    if not named.get(name):
        return []
    first, *rest = (each for each in named if each != name)
    node.args, node.kwargs = (named[first],), {each: named[each] for each in rest}
    return [f"{source_of(node)}: {name}=True asks for a sparse gradient, which is dense in a program, and equal"]


# Raise masked writes: one row written to the places that a mask chooses, as a `where` over all places.
#
#     x[mask] = row              becomes              chosen = where(mask.reshape([4, 12, 1]), row, x);  x.copy_(chosen)
#
# The gradient of `row` sums over the chosen places, whose number is not known beforehand; that of a `where` sums over all. Part of
# `raise_ops`. Writes with a different row for each place are unchanged.


WRITES: Final[tuple[object, ...]] = (operator.setitem, "__setitem__")


def raise_masked_writes(module: GraphModule) -> None:
    """Replaces the calls in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target not in WRITES or len(node.args) != 3:
            continue
        x, mask, row = node.args
        written, places, value = map(_value, node.args)
        if written is None or places is None or value is None or not _is_one_row(written, places, value):
            continue
        with graph.inserting_before(node):
            at = graph.call_method("reshape", (mask, [*places.shape, *[1] * (written.dim() - places.dim())]))
            chosen = graph.call_function(torch.where, (at, row, x))
            copied = graph.call_method("copy_", (x, chosen))
        for made in (at, chosen, copied):
            made.meta.update({key: value for key, value in node.meta.items() if key != "example_value"})
        graph.erase_node(node)


def _is_one_row(written: Tensor, places: Tensor, value: Tensor) -> bool:
    """Whether all places of `written` where the mask `places` is true get the same row `value`, whatever their number."""
    if places.dtype != torch.bool or value.dtype != written.dtype or value.dim() > written.dim():
        return False
    below = written.dim() - places.dim()
    return all(size == 1 for size in value.shape[: max(value.dim() - below, 0)])


def _value(argument: object) -> Tensor | None:
    value = argument.meta.get("example_value") if isinstance(argument, Node) else None
    return value if isinstance(value, Tensor) else None


# Number random calls: dropout, `rand` and attention with dropout get call numbers, in the order of the model.
#
#     h = torch.nn.functional.dropout(x, 0.1)           h = dropout(x, 0.1, seed_step=seed, call=0)
#     u = torch.rand_like(h)                  becomes   u = rand_like(h, seed_step=seed, call=1)
#
# Part of `raise_ops`. How many numbers a call takes, and what replaces it, is in `meshc/ops/random_calls.py`; what is drawn under a number,
# in docs/randomness.md. One device counts with the reference's own counter (`meshc/frontend/reference_random.py`).


NUMBERED: Final[dict[Target, Function]] = {
    functional.scaled_dot_product_attention: sdpa,
    functional.multi_head_attention_forward: multi_head_attention,
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
    with module.graph.inserting_before(next(node for node in module.graph.nodes if node.op != "placeholder")):
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


# Calls within torch.func transforms, which stay torch's own: numbered draws below the transform, and attention written out.
#
#     mask = vmap(lambda z: dropout(z, 0.1), randomness="different")(x)       one call, of the draws of all that vmap maps
#     grad(lambda z: scaled_dot_product_attention(z, z, z).sum())(x)          matmul, softmax, matmul
#
# Part of `raise_ops`. torch decides what `randomness` means, and draws random numbers below all levels, in the full batched shape. There
# the draws are replaced as on one device (`meshc/frontend/reference_random.py`).


def draw_below(node: Node, seed_step: Node, call: int, count: int) -> int:
    """Replaces the target by the same call whose draws have `count` numbers from `call` on. Returns how many: torch permutes once for each
    row that vmap maps. Raises CompileError for recurrent layers, whose dropout torch's own operators for traces leave out."""
    if node.target in recurrent.RAISED:
        raise CompileError(
            f"recurrent layers with dropout between them stand within a transform of torch.func\n  in your model: {source_of(node)}\n"
            "  why: torch takes them apart there, and leaves the dropout out\n"
            "  what to do: a layer each (num_layers=1), with nn.Dropout between; or torch.autograd.grad for the gradient"
        )
    if node.target is torch.randperm:
        drawn = node.meta["example_value"]
        count = below_wrappers(drawn).numel() // max(drawn.numel(), 1)
    node.op, node.target = "call_function", _drawing(node.target)
    node.kwargs = {**node.kwargs, "seed_step": seed_step, "numbers": (call, count)}
    return count


@functools.cache
def _written_out(target: Any) -> Function:
    """The math form of an attention."""

    def written_out(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return target(*args, **kwargs)

    written_out.__name__ = target.__name__
    return written_out


@functools.cache
def _drawing(target: Target) -> Function:
    def drawing(*args: Any, seed_step: Tensor, numbers: tuple[int, int], **kwargs: Any) -> Any:
        function, rest = (getattr(args[0], target), args[1:]) if isinstance(target, str) else (target, args)
        calls = iter(range(numbers[0], sum(numbers)))
        with sdpa_kernel(SDPBackend.MATH), _CallDraws(seed_step, calls):
            drawn = function(*rest, **kwargs)
        assert next(calls, None) is None, "it draws less than torch does outside of a trace"
        return drawn

    drawing.__name__ = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return drawing


class _CallDraws(ReferenceRandom):
    """Replaces the draws of one traced call by numbered ones."""

    def __init__(self, seed_step: Tensor, numbers: Iterator[int]) -> None:
        super().__init__(0)
        self.seed_step, self.numbers = seed_step, numbers

    def next(self, func: OpOverload, shape: Sequence[int], device: torch.device | None) -> tuple[Tensor, int, Tile]:
        return self.seed_step, next(self.numbers), (tuple(shape), tuple(shape), [0] * len(shape))
