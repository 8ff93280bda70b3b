"""Compress gradients: sums over an axis of data in fewer bits, with error feedback, where a compress line of the plan says so.

    g = aten.mm(t, x)     becomes     p = aten.bmm(..)                   [parts, ...]: the gradient of each part of the batch
                                      u = p + state:w/meshc.part_errors
                                      q = quantize(u)                    int8, fp8 or signs: what goes to where a tile of the sum is made
                                      state:w/meshc.part_errors = u - dequantize(q)
                                      s = sum(dequantize(q)) + state:w/meshc.sum_error
                                      r = quantize(s)                    what comes back
                                      state:w/meshc.sum_error = s - dequantize(r)
                                      g = dequantize(r)

The batch is cut in parts by its rows: as many as the axis has ranks, or as many as the line says. Each part is rounded by itself, and so is
the sum. All of this is written on the global view, on one device, so that a line means the same on every mesh whose axis divides the
number of parts, and `verify` and `prove` know it. What lies where follows from it: the axis splits the parts, so that p, u and the errors
of a rank's parts are that rank's; the sum is split along the axis too, over the elements; so q travels by an all-to-all, and r by a gather,
where the gradient is wanted whole. docs/compressed-gradients.md has the definition, and what it is not.

Only products with rows of the batch are cut: a gradient of fewer than two dims, or one that is no sum of such products, is summed as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch
from torch.fx import Node

from meshc.errors import PlanError, join_names
from meshc.ir import record
from meshc.ir import update as set_reason
from meshc.ir.formats import COMPRESSED, SIGN
from meshc.ir.graph import set_results
from meshc.ops import compress as _compress  # noqa: F401 - registers its operators
from meshc.ops.compress import BITS
from meshc.optimizer.spec import PART_ERRORS, SUM_ERROR
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.phases.traced_model import CompressionSide, TracedModel
from meshc.passes.place.find_factors import find_factors
from meshc.passes.place.gradient_parts import GradientParts, RowCut
from meshc.passes.trace.step_state import StepState
from meshc.plan.precision_lines import CompressLine

aten, meshc = torch.ops.aten, torch.ops.meshc

BATCH: Final = "batch"


def compress_gradients(traced: TracedModel) -> TracedModel:
    """Rewrites the gradients of a step, in place; `compressed` says which. Raises PlanError for lines that do not fit."""
    lines, request = traced.plan.gradient_compressions, traced.request
    if not lines:
        return traced
    if not request.grad:
        return traced.with_notes(*(f"{line}: no gradients are computed here, so none are compressed" for line in lines))
    line = _line_of(traced)
    if request.optimizer is None:
        return traced  # what `verify` compares of a step is its gradients ahead of the update
    joint, placed = traced.operators(), find_factors(traced)
    batch = {factor for factor, names in placed.names.also.items() if BATCH in names}
    cut = GradientParts(placed.factors, batch, line.count(placed.sizes[line.axis]))
    write = _CompressionWriter(StepState(joint), line, cut)
    results, why = [], dict[str, list[str]]()
    for port, node in zip(joint.outputs, joint.results(), strict=True):
        refusal = "" if port.kind == "gradient" else "-"
        if not refusal:
            refusal = write.refusal(node)
        if not refusal:
            node = write.compress(port.name, node)
        elif port.kind == "gradient":
            why.setdefault(refusal, []).append(port.name)
        results.append(node)
    if not write.cuts:
        _refuse_nothing(line, why)
    set_results(joint.graph, results)
    joint = replace(write.state.write_results(), compressed=write.compressed)
    joint.graph.eliminate_dead_code()
    notes = [f"{line}: {join_names(names, 4)} {'is' if len(names) == 1 else 'are'} summed as usual: {text}" for text, names in why.items()]
    cuts = {whole: found for name, found in write.cuts.items() for whole in whole_names(traced.depth, name)}
    return replace(traced.with_notes(*notes), joint=joint, compressed=cuts)


def _line_of(traced: TracedModel) -> CompressLine:
    """The one compress line, if it fits the request."""
    lines, request = traced.plan.gradient_compressions, traced.request
    line = lines[0]
    if len(lines) > 1:
        raise PlanError(
            f"{line.where} and {lines[1].where}: gradients are compressed over one axis\n"
            "  what to do: keep the line of the slowest axis; over the others gradients are summed as they are, before they are compressed"
        )
    if not request.train:
        raise PlanError(
            f"{line.where}: errors of what is rounded are state of a training step, and this is compiled without one\n"
            "  what to do: compile meshc.TrainStep(model, optimizer=...), or leave the line out"
        )
    entry = traced.plan.entry(line.axis)
    takes = [str(term) for term in entry.terms] if entry is not None else []
    if BATCH not in takes:
        data = [one.axis for one in traced.plan.axes if any(term.covers(BATCH) for term in one.terms) and one.axis != line.axis]
        what = f"a line for an axis of data, `compress {data[0]}: {line.format}`" if data else f"`{line.axis}: batch` as its entry"
        does = "its factors are left to a search" if entry is not None and entry.auto else f"it splits {', '.join(takes) or 'nothing'}"
        raise PlanError(f"{line.where}: {line.axis} reduces no gradient: {does}\n  what to do: write {what}, or leave the line out")
    ranks, parts = traced.sizes[line.axis], line.count(traced.sizes[line.axis])
    if parts % ranks:
        raise PlanError(
            f"{line.where}: {ranks} ranks of {line.axis} do not share {parts} parts of the batch equally\n"
            f"  what to do: a number of parts that {ranks} divides, or an axis whose size divides {parts}"
        )
    if request.inputs == "local" and line.axis not in traced.local_batch[:1]:
        first = ", ".join(traced.local_batch[:1]) or "none"
        raise PlanError(
            f"{line.where}: with inputs=\"local\" a part is the rows of ranks of the outermost axis of data, and that is {first}\n"
            f"  what to do: put {line.axis} before {first} in the mesh, or inputs=\"global\""
        )
    if traced.parts is not None:
        raise PlanError(
            f"{line.where}: a mean of microbatches (batch_mix=\"mean_of_parts\") is not compressed yet\n"
            "  what to do: batch_mix=\"refuse\", or leave the line out"
        )
    if request.scales_loss:
        raise PlanError(
            f"{line.where}: errors of gradients are kept from step to step, and the loss's scale, by which they are multiplied, changes\n"
            "  what to do: TrainStep without scaler=, in float32 or under autocast to bfloat16, or leave the line out"
        )
    if request.adds:
        raise PlanError(
            f"{line.where}: gradients that are added up over calls are not compressed yet\n"
            "  what to do: one call of the program for a step, or leave the line out"
        )
    return line


def _refuse_nothing(line: CompressLine, why: Mapping[str, list[str]]) -> None:
    rows = "".join(f"\n    {join_names(names, 4)}: {text}" for text, names in why.items())
    raise PlanError(f"{line.where}: no gradient of this model can be compressed{rows}\n  what to do: leave the line out")


@dataclass(frozen=True)
class Compression:
    """How the gradient of one parameter is compressed.

    format  name in `COMPRESSED`
    cut     rows of each product that the gradient is the sum of, in the order in which they are added
    """

    format: str
    cut: tuple[RowCut, ...]


class _CompressionWriter:
    def __init__(self, state: StepState, line: CompressLine, parts: GradientParts) -> None:
        self.state, self.add, self.line, self.parts = state, state.add, line, parts
        self.compressed: dict[Node, CompressionSide] = {}
        self.cuts: dict[str, Compression] = {}

    def refusal(self, gradient: Node) -> str:
        """Why a gradient stays as it is; "" if it does not."""
        made = record(gradient)
        if len(made.shape) < 2:
            return "they have fewer than two dims"
        if made.dtype is None or not made.dtype.is_floating_point:
            return "they are no floating-point numbers"
        products = self.parts.products(gradient)
        if products is None:
            return "they are no sums of products alone"
        if self.line.format == SIGN and made.shape[-1] % BITS:
            return f"a row is no multiple of {BITS} signs"
        return next((cut for cut in map(self.parts.cut, products) if isinstance(cut, str)), "")

    def compress(self, name: str, gradient: Node) -> Node:
        """The gradient after compression; adds ports and results of its errors."""
        products = self.parts.products(gradient) or []
        parts, own = self.parts.of(gradient), record(gradient).dtype
        assert own is not None
        computed = torch.float64 if own == torch.float64 else torch.float32
        before = len(self.add.made)
        given = self._cast(parts, computed)
        errors = self.state.enter(name, PART_ERRORS, record(parts).shape, computed)
        wanted = self._on_parts(aten.add.Tensor, given, errors)
        sent = self._round(wanted, 1, computed, home=False)
        self.state.leave(name, PART_ERRORS, self._on_parts(aten.sub.Tensor, wanted, sent))
        error = self.state.enter(name, SUM_ERROR, record(gradient).shape, computed)
        total = self._at_home(aten.add.Tensor, self._at_home(aten.sum.dim_IntList, sent, [0]), error)
        back = self._round(total, 0, computed, home=True)
        self.state.leave(name, SUM_ERROR, self._at_home(aten.sub.Tensor, total, back))
        for node in self.add.made[before:]:
            self.state.updates[node] = name
            set_reason(node, reason=f"{self.line}")
        self.cuts[name] = Compression(self.line.format, tuple(self.parts.cuts[one] for one in products))
        return self._cast(back, own)

    def _on_parts(self, target: object, *args: object) -> Node:
        node = self.add.call(target, *args)  # type: ignore[arg-type]
        self.compressed[node] = CompressionSide(self.line.axis, home=False)
        return node

    def _at_home(self, target: object, *args: object) -> Node:
        node = self.add.call(target, *args)  # type: ignore[arg-type]
        self.compressed[node] = CompressionSide(self.line.axis, home=True)
        return node

    def _cast(self, value: Node, dtype: torch.dtype) -> Node:
        return value if record(value).dtype == dtype else self.add.call(aten._to_copy.default, value, dtype=dtype)

    def _round(self, value: Node, lead: int, dtype: torch.dtype, home: bool) -> Node:
        """A value after rounding. `lead`: 1 if its first dim is that of parts."""
        shape = list(record(value).shape)
        if self.line.format != SIGN:
            element, tile = COMPRESSED[self.line.format], (shape, shape, [0] * len(shape), 1)
            peak = (self._at_home if home else self._on_parts)(meshc.block_scale.default, value, *tile)
            made = self.add.call(meshc.quantize_blocks.default, value, peak, element, *tile)
            return self.add.call(meshc.dequantize_blocks.default, made, peak, element, dtype, *tile)
        call = self._at_home if home else self._on_parts
        mean = call(aten.sum.dim_IntList, call(aten.abs.default, value), [*range(lead, len(shape))], True)
        scale = call(aten.mul.Tensor, mean, 1.0 / prod(shape[lead:]))
        rows = self.add.call(aten.reshape.default, value, [*shape[:-1], shape[-1] // BITS, BITS])
        made = self.add.call(meshc.unpack_signs.default, self.add.call(meshc.pack_signs.default, rows), scale)
        return self.add.call(aten.reshape.default, made, shape)
