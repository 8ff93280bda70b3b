"""Precision: products with a weight in few bits, where a precision line of the plan says so.

    y = aten.mm(x, t)            becomes       s = meshc.scale_of(x, [1], "e4m3", "");  q = meshc.quantize(x, s, "e4m3")     and so of t
                                               y = meshc.scaled_mm(q, q_1, s, s_1, bfloat16)

Of each product the two of backward become such products too: of the gradient with the weight, and with what the weight was multiplied by.
What is rounded is what the product reads, in the model's own dtype, so that every mesh rounds the same numbers. A head, a router, and what
is no product with a weight stay as they are, unless a line names the module itself.

Runs on the joint graph, so that forward and backward are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.ir import Record, record
from meshc.ir.formats import ELEMENTS, FORMATS, WEIGHT_GRADIENT, WHOLE, Format, Role, draw_name
from meshc.ir.functions import Function
from meshc.ir.graph import call
from meshc.ir.schemas import named_arguments
from meshc.ops import quantize as _quantize  # noqa: F401 - registers its operators
from meshc.passes.depth.captured_names import captured_lines
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.delayed_scales import PeakHistories, why_no_history
from meshc.passes.trace.round_before_dispatch import round_before_dispatch
from meshc.passes.trace.step_state import refuse_without_steps
from meshc.passes.trace.weight_products import PRODUCTS, RUNS, SUMMANDS, WeightProduct, WeightProducts, factors_of, faults_of_unused
from meshc.plan.plan_faults import refuse_faults
from meshc.plan.precision_lines import AUTO, PrecisionLine

aten, meshc = torch.ops.aten, torch.ops.meshc


def set_precision(traced: TracedModel) -> TracedModel:
    """Rewrites the products that the plan's precision lines cover, in place; `precision` says which. Raises PlanError for lines that fit
    none of the model's products."""
    if not traced.plan.formats:
        return traced
    joint = traced.operators()
    products = WeightProducts(joint)
    lines = captured_lines(traced.plan.formats, traced.depth)
    faults = faults_of_unused(lines, [product.module for product in products.all])
    refuse_faults("the plan does not fit this model", list(faults.values()))
    for line in lines:
        if line.format != AUTO and FORMATS[line.format].history:
            plain = f"`{line.format.partition(',')[0]}`, whose scales are of what is rounded"
            refuse_without_steps(traced, line.where, f"scales of `{line.format}` are made", plain)
    covered, notes = products.covered_by(lines, "precision")
    undecided = [product for product, line in covered if line.format == AUTO]
    refuse_faults("the plan contradicts itself", _faults_of_undecided(undecided, lines))
    chosen, misfits = _fitting(traced, [(product, line) for product, line in covered if line.format != AUTO], products.all)
    forms = [form for _, form in chosen]
    notes += misfits + _batch_notes(traced, lines, forms)
    operands: dict[Node, tuple[Format, list[Role], str]] = {}
    rows: dict[Node, tuple[Format, int]] = {}
    for product, form in chosen:
        name = product.parameters[0]
        operands[product.node] = form, _roles("activation", product.weight, "weight"), name
        for node, gradient, what in products.backward_of(product):
            if what == WEIGHT_GRADIENT and form.by_row:
                rows[node] = form, 1 - gradient
            elif what not in form.high:
                operands[node] = form, _roles("activation" if what == WEIGHT_GRADIENT else "weight", gradient, "gradient"), name
    histories = PeakHistories(joint)
    write = ProductWriter(joint.graph, histories)
    for node in [node for node in joint.graph.nodes if node in operands]:
        write.replace(node, *operands[node])
    for node, (form, place) in rows.items():
        write.round_rows(node, form, place)
    traced = replace(traced.with_notes(*notes), joint=histories.write_results())
    joint.graph.eliminate_dead_code()
    round_before_dispatch(joint.graph)
    return replace(
        traced, precision=_formats(traced, products, {product.node: form for product, form in chosen}),
        open_formats=_open_formats(traced, products.all, undecided),
    )  # fmt: skip


def _formats(traced: TracedModel, products: WeightProducts, chosen: Mapping[Node, Format]) -> dict[str, tuple[Format | None, ...]]:
    """By parameter that a product in few bits reads, the format of each of its products."""
    found: dict[str, list[Format | None]] = {}
    for product in products.all:
        for name in product.parameters:
            found.setdefault(name, []).append(chosen.get(product.node))
    return {whole: tuple(forms) for name, forms in found.items() if any(forms) for whole in whole_names(traced.depth, name)}


def _faults_of_undecided(undecided: Sequence[WeightProduct], lines: Sequence[PrecisionLine]) -> list[str]:
    """Messages about lines with a format before one that leaves it open: products that the compiler leaves as they are would have it."""
    found = dict[str, None]()
    for product in undecided:
        before = [line for line in lines if line.covers(product.module)]
        for line in before:
            if line.format != AUTO:
                said = f"{before[-1].where} leaves open what {line.where} says of {product.where}"
                found[f"{said}: write the line that says {AUTO} first, so that the other counts, or leave one of them out"] = None
    return list(found)


def _open_formats(traced: TracedModel, products: Sequence[WeightProduct], undecided: Sequence[WeightProduct]) -> dict[str, bool]:
    """By module, whether its products are all left open; nothing if none is."""
    is_open = dict[str, bool]()
    for product in products if undecided else ():
        for whole in whole_names(traced.depth, product.module):
            is_open[whole] = is_open.get(whole, True) and product in undecided
    return is_open


def _fitting(
    traced: TracedModel, products: Sequence[tuple[WeightProduct, PrecisionLine]], among: Sequence[WeightProduct]
) -> tuple[list[tuple[WeightProduct, Format]], list[str]]:
    """The products whose sizes fit their format, with it, and notes on the others, and on what stays as it is of these."""
    chosen, notes = [], dict[str, None]()
    for product, line in products:
        form, where = FORMATS[line.format], product.where
        why = _misfit(product, form) or (why_no_history(traced, product, among) if form.history else "")
        if why:
            notes[f"precision: {where} stays as it is: {why}"] = None
            continue
        if product.is_of_runs and form.is_scaled and WEIGHT_GRADIENT not in form.high:
            form = replace(form, by_row=True)
            said = "the gradient of experts' weights is made of the rows that forward has rounded, and of gradients as they are"
            notes[f"precision: {where}: {said}"] = None
        elif product.is_of_runs:
            form = replace(form, high=frozenset({WEIGHT_GRADIENT}))
        chosen.append((product, form))
    return chosen, list(notes)


def _batch_notes(traced: TracedModel, lines: Sequence[PrecisionLine], forms: Sequence[Format]) -> list[str]:
    """A note on scales that go along the batch that comes in microbatches. Raises PlanError in a pipeline, of which no stage has it."""
    request = traced.request
    along = {form.name for form in forms if form.spans_batch}
    if traced.parts is not None or request.count == 1 or not along or not request.grad:
        return []
    said = "scales that go along the batch (of a tensor, and of rows in gradients of weights)"
    others = "`float8 row, gradients in bf16` and `float8 block` have none"
    if request.train:
        others += ", `float8 tensor, delayed` knows them before, or TrainStep(batch_mix=\"mean_of_parts\")"
    if traced.mesh.pipeline_axis is not None:
        faults = [f"{line.where}: {said} need all microbatches at once, of which a stage has one at a time; {others}" for line in lines
                  if line.format in along]  # fmt: skip
        refuse_faults("the plan does not fit this pipeline", list(dict.fromkeys(faults)))
    return [f"precision: {said} are made once all microbatches have run, until when what they scale is held: {others}"]


def _misfit(product: WeightProduct, form: Format) -> str:
    """Why a format does not fit a product; "" if it does."""
    if product.is_of_runs and form.is_scaled and (form.across["activation"] != 1 or form.two):
        return f"the rows of each expert would need scales of their own, which {form.name} has of all; a scale for each row fits"
    if form.random and (product.is_of_runs or PRODUCTS[product.node.target]):
        return "draws are numbered for products of two matrices, and it has a batch of them"
    if form.along == WHOLE:
        return ""
    sizes = [*record(factors_of(product.node)[product.weight]).shape[-2:], record(product.node).shape[-2]]
    odd = [size for size in sizes if type(size) is not int or size % form.along]
    return f"{form.name} takes sizes in multiples of {form.along}, and it has {', '.join(map(str, odd))}" if odd else ""


def _roles(other: Role, place: int, role: Role) -> list[Role]:
    return [role if position == place else other for position in (0, 1)]


@dataclass(frozen=True)
class _ScaledOperand:
    """An operand of a scaled product: values of an element type, and their scale, of as many dims."""

    values: Node
    scale: Node


class ProductWriter:
    """Writes products in few bits in the place of others. An operand that two products read in one form is rounded once."""

    def __init__(self, graph: Graph, histories: PeakHistories) -> None:
        self.graph, self.histories = graph, histories
        self._made: dict[object, _ScaledOperand] = {}

    def replace(self, node: Node, form: Format, roles: Sequence[Role], name: str) -> None:
        """Products are replaced in the order of the graph. `roles`: what the two factors are; `name`: of the weight that it is about."""
        self._name, self._sums_features = name, "weight" in roles
        factors = factors_of(node)
        summand = node.args[0] if node.target in SUMMANDS else None
        with self.graph.inserting_before(node):
            if node.target in RUNS:
                made = self._write_runs(node, form, factors, roles)
            elif form.is_scaled:
                made = self._write_scaled(node, form, factors, roles, PRODUCTS[node.target])
            else:
                made = self._write_unscaled(node, form, factors)
            if isinstance(summand, Node):
                made = self._add_summand(node, summand, made)
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def _add_summand(self, node: Node, summand: Node, made: Node) -> Node:
        """beta * summand + alpha * the product."""
        named = named_arguments(node)
        terms = [
            one if named[factor] == 1 else self._emit(node, aten.mul.Scalar, one, named[factor])
            for one, factor in ((summand, "beta"), (made, "alpha"))
        ]
        return self._emit(node, aten.add.Tensor, *terms)

    def _write_runs(self, node: Node, form: Format, factors: Sequence[Node], roles: Sequence[Role]) -> Node:
        """The same product of operands that are rounded, and brought back to their dtype."""
        if not form.is_scaled:
            return self._write_unscaled(node, form, factors)
        given = [self._round(node, x, form, role, summed) for x, role, summed in zip(factors, roles, (-1, -2), strict=True)]
        return self._emit(node, cast(Function, node.target), *given, *node.args[2:], **node.kwargs)

    def round_rows(self, node: Node, form: Format, place: int) -> None:
        """Has the gradient of the matrices of runs read rows as the product of forward does; `place`: of the rows among its factors."""
        x = factors_of(node)[place]
        with self.graph.inserting_before(node):
            turned = node.target in RUNS and place == 0  # [k, r]
            node.update_arg(place, self._round(node, x, form, "activation", -2 if turned else -1))

    def _round(self, node: Node, x: Node, form: Format, role: Role, summed: int) -> Node:
        """x, rounded along dim `summed` (-1 or -2) and brought back to its dtype."""
        shape = record(x).shape
        operand = self._operand(node, x, form, role, len(shape) - 2, len(shape) + summed)
        plain = self._emit(node, meshc.dequantize.default, operand.values, operand.scale, record(x).dtype)
        return plain if record(plain).shape == shape else self._emit(node, aten.reshape.default, plain, list(shape))

    def _write_unscaled(self, node: Node, form: Format, factors: Sequence[Node]) -> Node:
        rounded = [self._emit(node, aten._to_copy.default, one, dtype=ELEMENTS[form.element].dtype) for one in factors]
        target, others = (SUMMANDS[node.target], ()) if node.target in SUMMANDS else (node.target, node.args[2:])
        kept = node.kwargs if node.target in RUNS else {}
        made = self._emit(node, cast(Function, target), *rounded, *others, **kept)
        return self._emit(node, aten._to_copy.default, made, dtype=record(node).dtype)

    def _write_scaled(self, node: Node, form: Format, factors: Sequence[Node], roles: Sequence[Role], batch: int) -> Node:
        (a, b), (left, right) = factors, roles
        rows = self._operand(node, a, form, left, batch, summed=batch + 1)
        columns = self._operand(node, b, form, right, batch, summed=batch)
        summed = 1 if form.along == WHOLE else 2
        made = self._emit(
            node, meshc.scaled_mm.default, rows.values, columns.values, rows.scale, columns.scale, record(node).dtype, summed, batch
        )
        shape = record(node).shape
        return made if record(made).shape == shape else self._emit(node, aten.reshape.default, made, list(shape))

    def _operand(self, at: Node, x: Node, form: Format, role: Role, batch: int, summed: int) -> _ScaledOperand:
        """x [batch.., m, k] or [batch.., k, n], whose dim `summed` is that of k, in blocks along k, and along the other dim where a scale
        covers several of it."""
        swapped = x.target in (aten.t.default, aten.transpose.int) and not batch
        if swapped:  # so that two products that read it in either order round it once
            (x, *_) = x.all_input_nodes
            summed = 1 - summed
        drawn = form.random and role == "gradient"
        if drawn and (summed == 0) == self._sums_features:  # draws are numbered by rows, then by features
            x, summed, swapped = self._emit(at, aten.t.default, x), 1 - summed, not swapped
        other = 2 * batch + 1 - summed
        per = {summed: form.along, other: form.across[role]}
        element = form.gradient if role == "gradient" else form.element
        key = (x, element, form.rounded, form.two, form.history, tuple(sorted(per.items())), drawn and self._name)
        if key not in self._made:
            self._made[key] = self._quantize(at, x, form, element, per, role)
        found = self._made[key]
        if not swapped:
            return found
        counts = [1 + (1 < per[dim]) for dim in (0, 1)]
        order: Argument = [*range(counts[0], sum(counts)), *range(counts[0])]
        return _ScaledOperand(*(self._emit(at, aten.permute.default, value, order) for value in (found.values, found.scale)))

    def _quantize(self, at: Node, x: Node, form: Format, element: str, per: dict[int, int], role: Role) -> _ScaledOperand:
        """x in blocks of `per` elements along each dim, with its scales. WHOLE and 1 make no blocks."""
        shape, cut, over = record(x).shape, list[int](), list[int]()
        for dim, size in enumerate(shape):
            count = per.get(dim, 1)
            if count > 1:
                cut += [size // count, count]
            else:
                cut.append(size)
            if count != 1:
                over.append(len(cut) - 1)
        blocks = x if len(cut) == len(shape) else self._emit(at, aten.reshape.default, x, cut)
        if form.history:
            scale = self.histories.scale(partial(self._emit, at), blocks, over, element, (self._name, role), form)
        else:
            scale = self._emit(at, meshc.scale_of.default, blocks, over, element, form.rounded)
        if form.two:
            unit = self._emit(at, meshc.scale_of.default, blocks, list(range(len(cut))), element, "")
            scale = self._emit(at, meshc.scale_in_units.default, scale, unit)
        if not (form.random and role == "gradient"):
            return _ScaledOperand(self._emit(at, meshc.quantize.default, blocks, scale, element), scale)
        name, whole = draw_name(self._name, self._sums_features), list(record(blocks).shape)
        tile = whole, whole, [0] * len(whole)
        seed = self.histories.state.seed_step
        return _ScaledOperand(self._emit(at, meshc.quantize_by_draw.default, blocks, scale, element, seed, name, *tile), scale)

    def _emit(self, at: Node, target: Function, *args: Argument, **kwargs: Argument) -> Node:
        """A call in the phase and place of a product; its shape and dtype by a run on meta tensors."""

        def meta(argument: Argument) -> object:
            if isinstance(argument, Node):
                found = record(argument)
                return torch.empty(found.shape, dtype=found.dtype, device="meta")
            return argument

        result = target(*map(meta, args), **{name: meta(each) for name, each in kwargs.items()})
        base = record(at)
        found = Record(tuple(result.shape), result.dtype, source=base.source, phase=base.phase)
        return call(self.graph, found, target, *args, **kwargs)
