"""One row: padding of a batch of 1 over an axis, by a trace whose batch size is symbolic.

    x: f32[1, 8] over dp=2                 x: f32[batch n_batch, 8], n_batch = 1       each rank has a tile of one row: the first rank's
    mm(x, w): f32[1, 16]          becomes  mm(x, w): f32[batch n_batch/dp, 16]         is the row, the others' is padding

Tracing specialises a size of 1: it broadcasts, it is squeezed, models branch on it. So a dim of 1 has no factor, and every rank would
compute the whole batch. One trace does not show whether the dim is a batch or broadcasts; two traces do. If torch's graph of the model with
a symbolic size is, at 1, the graph of the model at 1 (the same calls, the same arguments, the same shapes), then the program of the
symbolic size is the model's, with 1 put in at the end. Otherwise the batch stays whole, and a warning reports where the two differ.

Only axes that have nothing else to split take such a row; ranks of any other axis have work without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from meshc.errors import CompileError
from meshc.frontend.dynamic_dims import DynamicDims
from meshc.frontend.sources import source_of
from meshc.ir import trees
from meshc.ir.paths import input_names
from meshc.ir.sizes import at
from meshc.passes.phases.compilation_phase import CompilationPhase, begin
from meshc.passes.phases.factors import Factors
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import OpenedDims, Request
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.place.annotate import idle
from meshc.passes.place.interests import Interest
from meshc.passes.trace.put_sizes import substitute_in_joint
from meshc.private import FakeTensor
from meshc.program import instance

Number = Callable[[object], object]
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class RowsDiffer(CompileError):
    """The model computes something else for one row than for several."""


def rows_to_open(placed: PlacedModel) -> OpenedDims | None:
    """The dims to leave symbolic in a model that was traced at 1; None if no axis would have more to split. Raises CompileError where it
    cannot be done."""
    ask, axes = placed.request, idle(placed)
    dims: dict[str, dict[int, str]] = {}
    for name, dim, label in _rows(placed):
        if any(term.covers(label) for entry in axes.values() for term in entry.terms):
            dims.setdefault(name, {})[dim] = label
    if not dims:
        return None
    if ask.dynamic:
        raise RowsDiffer("it is not padded where Options(dynamic=...) leaves other sizes open")
    labels = {label for row in dims.values() for label in row.values()}
    return OpenedDims(DynamicDims(dims, {label: (1, 1) for label in sorted(labels)}), frozenset(axes))


def _rows(placed: PlacedModel) -> list[tuple[str, int, str]]:
    """(input, dim, name) of each dim of 1 that has a name: the user's, or batch."""
    found, ask = [], placed.request
    leaves = trees.leaves((ask.args, dict(ask.kwargs)))
    for name, leaf in zip(input_names(ask.signature, ask.args, ask.kwargs), leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            labels = [*(ask.names or {}).get(name, [None] * leaf.dim())]
            batch = placed.names.batch.dims.get(name, 0)
            if batch is not None:
                labels[batch] = labels[batch] or "batch"
            found += [(name, dim, label) for dim, label in enumerate(labels) if label and leaf.shape[dim] == 1 and label.isidentifier()]
    return found


def begin_with_open_rows(ask: Request, rows: OpenedDims) -> CompilationPhase:
    """The first phase of a new trace with these rows open. With one row there is one microbatch."""
    notes = [f"microbatches={ask.count}: the batch has one row, so the step runs as one microbatch"] if ask.count > 1 else []
    return replace(begin(replace(ask, microbatches=1)), opened=rows).with_notes(*notes)


def why_whole(error: Exception) -> str:
    """Why a row stays whole, from the error that padding it raised: the first line, and the place in the user's model."""
    first, *rest = map(str.strip, str(error).splitlines() or [""])
    if isinstance(error, RowsDiffer):
        return first
    place = next((f" ({line})" for line in rest if line.startswith("in your model: ")), "")
    return f"traced with its size open, {first}{place}"


def interests_of_rows(opened: OpenedDims, factors: Factors, found: Mapping[str, Interest]) -> dict[str, Interest]:
    """The interests of axes, where rows that were opened are for the axes that they were opened for."""
    rows = {factor for factor, size in factors.size.items() if str(size) in opened.values}
    return {
        axis: one if axis in opened.axes else replace(one, ranks={factor: row for factor, row in one.ranks.items() if factor not in rows})
        for axis, one in found.items()
    }


def settle(lowered: LoweredProgram) -> LoweredProgram:
    """A finished program, with 1 put in for the symbolic size of a row."""
    assert lowered.opened is not None
    values, placed = lowered.opened.values, lowered.placed
    joint = substitute_in_joint(placed.joint, values)
    factors = replace(placed.factors, size={factor: at(size, values) for factor, size in placed.factors.size.items()})
    return replace(
        lowered,
        placed=replace(placed, joint=joint, view=lambda: joint, factors=factors),
        stages={name: instance.substitute_in_stage(stage, values) for name, stage in lowered.stages.items()},
        backward=None if lowered.backward is None else instance.substitute_in_stage(lowered.backward, values),
        inputs=instance.substitute_in_ports(lowered.inputs, values),
        outputs=instance.substitute_in_ports(lowered.outputs, values),
    )


# ------------------------------------------------------------------------------------------------------------------------ the two traces


def compare(whole: TracedModel, rows: TracedModel) -> None:
    """Raises CompileError if `rows`, a trace with symbolic rows, differs at 1 from `whole`, which was traced at 1."""
    assert rows.model.symbols is not None and rows.opened is not None
    symbols, values = rows.model.symbols, rows.opened.values
    broken = [f"{size.name} >= {size.low}" for size in rows.dynamic if size.low > 1]
    broken += [text for text in rows.constraints if not instance.holds(text, values)]
    if broken:
        raise RowsDiffer(f"the model computes otherwise unless {' and '.join(broken)}")
    _compare(whole.model.module, rows.model.module, lambda value: at(symbols.open(value), values))


def _compare(fixed: GraphModule, free: GraphModule, number: Number) -> None:
    ours, theirs = _calls(fixed, lambda value: value), _calls(free, number)
    for (node, mine), (_, other) in zip(ours, theirs, strict=False):
        if mine != other:
            raise RowsDiffer(_difference_text(node))
        if node.op == "get_attr":
            held, again = (getattr(module, str(node.target)) for module in (fixed, free))
            if isinstance(held, GraphModule):
                _compare(held, again, number)
            elif not _same(held, again):
                raise RowsDiffer(_difference_text(node))
    if len(ours) != len(theirs):
        shorter, longer = sorted((ours, theirs), key=len)
        raise RowsDiffer(_difference_text(longer[len(shorter)][0]))


def _same(one: object, other: object) -> bool:
    """Whether two traces hold the same tensor; parameters and buffers are fake, and compared by name."""
    is_fake = isinstance(one, FakeTensor) or isinstance(other, FakeTensor)
    if is_fake or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    return torch.equal(one, other)


def _calls(module: GraphModule, number: Number) -> list[tuple[Node, object]]:
    """Every call of the graph as a comparable value: target, arguments, shapes of results. Computed numbers are inlined where they are
    used."""
    numbers: dict[Node, object] = {}
    places: dict[Node, str] = {}
    found: list[tuple[Node, object]] = []

    def plain(argument: object) -> object:
        if isinstance(argument, Node):
            return numbers[argument] if argument in numbers else places[argument]
        if isinstance(argument, list | tuple):
            return tuple(map(plain, argument))
        if isinstance(argument, dict):
            return tuple((key, plain(value)) for key, value in argument.items())
        if isinstance(argument, slice):
            return ("slice", plain(argument.start), plain(argument.stop), plain(argument.step))
        if isinstance(argument, _NUMBERS) and not isinstance(argument, bool):
            value = number(argument)
            return f"{value:.12g}" if isinstance(value, float) else str(value)  # 1.0 may have come out as 1
        return argument

    def result_types(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), *map(plain, value.shape))
        return tuple(map(result_types, value)) if isinstance(value, list | tuple) else None

    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op in ("call_function", "call_method") and _numeric(value):
            numbers[node] = plain(value)
            continue
        places[node] = f"%{len(places)}"
        target = "" if node.op == "placeholder" else node.target
        found.append((node, (node.op, target, plain(node.args), plain(node.kwargs), result_types(value))))
    return found


def _numeric(value: object) -> bool:
    """Whether a call returns numbers alone: a size, or a shape."""
    return isinstance(value, (*_NUMBERS, torch.Size)) or isinstance(value, list | tuple) and value != () and all(map(_numeric, value))


def _difference_text(node: Node) -> str:
    source = source_of(node)
    return f"the model does otherwise for one row than for several: {source or node.name}{source.code and f' ({source.code})'}"
