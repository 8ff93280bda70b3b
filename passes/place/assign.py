"""Assign: the sharding of every value, by `propagate`, and the chunked head, with notes on parts of the plan that have no effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

from torch import nn

from meshc.cost.flops import flops, is_product
from meshc.errors import PlanError
from meshc.ir import Record, records
from meshc.ir.spmd import MICROBATCH
from meshc.passes.depth.captured_names import captured_lines
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.compression_sides import parts_factors, with_parts
from meshc.passes.place.head_operators import mark_chunked_head
from meshc.passes.place.interests import Interest, interests
from meshc.passes.place.one_row import interests_of_rows
from meshc.passes.place.propagate import Propagator
from meshc.passes.place.ring_attention import PASSING, WRITTEN_OUT, Rings, gathered_written_out
from meshc.passes.place.storage import CLAUSE, with_slots

Kind = TypeVar("Kind", bound=Propagator)


def assign(placed: PlacedModel) -> PlacedModel:
    placed = mark_chunked_head(placed)
    decides = propagator(placed, Propagator)
    how = placed.request.options.sequence.attention
    decides.rings = rings = Rings(placed.mesh, placed.sizes, placed.factors, how, placed.request.grad)
    placed = replace(placed, assignment=decides.assign_shardings())
    about_the_plan = (*_idle_pins(placed), *_idle_store_lines(placed), *_no_rings(placed, rings), *recurrent_notes(placed))
    return placed.with_notes(*_replication_notes(placed), *_whole_updates(placed, decides), *about_the_plan)


def propagator(placed: PlacedModel, kind: type[Kind]) -> Kind:
    """The propagator of a placed model under its plan."""
    joint, names = placed.joint, placed.names
    interest = interests(placed.plan, names, list(placed.sizes))
    if placed.opened is not None:
        interest = interests_of_rows(placed.opened, placed.factors, interest)
    if placed.parts is not None:
        interest[MICROBATCH] = Interest(MICROBATCH, {})  # the graph is one microbatch's already
    parts = parts_factors(joint, placed.factors)
    if parts:
        interest = with_parts(interest, parts, placed.factors)
    return kind(
        joint.graph, placed.factors, names, placed.plan, placed.sizes, joint.inputs, updates=joint.updates, interest=interest,
        pins=placed.pins, fixed=placed.request.fixed, local_batch=placed.local_batch, choices=placed.choices, chunked=placed.chunked,
        caches=placed.traced.model.output_tree.caches(), compressed=joint.compressed, parts=parts,
    )  # fmt: skip


def _idle_pins(placed: PlacedModel) -> list[str]:
    """Notes on pins of values that each rank computes where needed, in whatever sharding is requested."""
    free, pins = placed.require_assignment().free, placed.pins.values.items()
    values = [value for value, slots in pins if value[0].op == "call_function" and value[0] in free and any(slots.values())]
    return [
        f"the pin of value:{', '.join(records(node)[index].returned_by) or node.name} has no effect: nothing but integers goes into it, "
        "so each rank makes the part it uses"
        for node, index in values
    ]


def _idle_store_lines(placed: PlacedModel) -> list[str]:
    """Notes on store lines without effect: of a parameter whose storage an earlier program has fixed, and of a gradient that does not
    outlive its step."""
    decided, request = placed.require_assignment(), placed.request
    notes = []
    for line in placed.plan.stores:
        captured = captured_lines([line], placed.depth)
        matched = [(name, kind) for name, kind in placed.pins.stored if any(each.matches(name) for each in captured)]
        about = [(name, kind) for name, kind in matched if CLAUSE[kind] in line.kinds]
        laid = [
            name for name, kind in about
            if kind == "parameter" and name in request.fixed and with_slots(decided.storage[name, kind], placed.pins.stored[name, kind])
            != decided.storage[name, kind]
        ]  # fmt: skip
        if laid:
            notes.append(f"{line.where}: {_several(laid)} lies as the program of this model that was compiled first has it")
        within = [
            name for name, kind in about
            if kind == "gradient" and request.optimizer is not None and decided.storage[name, kind] != decided.storage[name, "state"]
        ]  # fmt: skip
        if within:
            notes.append(f"{line.where}: no gradient outlives a TrainStep; that of {_several(within)} goes to where the state lies at once")
    return notes


def _no_rings(placed: PlacedModel, rings: Rings) -> list[str]:
    """Notes on attention whose keys are gathered although a ring was requested. Raises PlanError if the request must be met."""
    if rings.how not in PASSING:
        return []
    found = [(records(node)[0], why) for node, why in rings.refused.items() if records(node)[0].phase == "forward"]
    found += [(records(node)[0], WRITTEN_OUT) for node in gathered_written_out(placed.require_assignment())]
    if found and placed.request.must_pass:
        faults = [
            f"Options(sequence=SplitSequence(attention='{rings.how}')): the keys of {record.source.module or 'attention'} cannot pass "
            f"round, in {record.source}: {why}\n"
            "  what to do: split its heads and not its positions, by a line such as `cp: heads@attention > seq`; or leave "
            "Options(sequence=SplitSequence(attention=))\n  out, so that its keys are gathered, and those of each other attention go the "
            "way that is predicted to be faster"
            for record, why in found
        ]
        raise PlanError(placed.request.options.as_written("\n".join(faults)))
    return [f"the keys of {record.source.module or 'attention'} are gathered, in {record.source}: {why}" for record, why in found]


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and others"


def _replication_notes(placed: PlacedModel) -> list[str]:
    seen: dict[str, tuple[int, int, str]] = {}
    for node in placed.require_assignment().replicated:
        tensors = [(result.shape, result.dtype) for result in records(node) if result.dtype is not None]
        size = sum(prod(map(placed.real, shape)) * dtype.itemsize for shape, dtype in tensors)
        name = str(node.target).removesuffix(".default")
        times, total, where = seen.get(name, (0, 0, _place(records(node)[0])))
        seen[name] = (times + 1, total + size, where)
    return [
        f"{name} has no rule: it runs whole on every rank ({times}x, {total:,} bytes of results){where}"
        for name, (times, total, where) in seen.items()
    ]


def _whole_updates(placed: PlacedModel, decides: Propagator) -> list[str]:
    """A note on updates that need whole matrices, and their FLOPs; how they are divided is reported by `divide_updates`."""
    work = defaultdict[str, float](float)
    for node in decides.whole_updates:
        work[placed.joint.updates[node]] += flops(node)
    counts = {name: len(whole_names(placed.depth, name)) for name in sorted(work)}
    total = sum(work[name] * count for name, count in counts.items())
    if not total or placed.mesh.world_size == 1:
        return []
    many = sum(counts.values())
    return [
        f"the optimizer updates {next(iter(counts))}{f' and {many - 1} more' if many > 1 else ''} by products of whole matrices, "
        f"{total / 1e9:,.3g} GFLOP a step"
    ]


def _place(record: Record) -> str:
    """The user's line that first computes a value, if there is one."""
    if str(record.source):
        return f", first at {record.source}"
    return ", in the optimizer's step" if record.phase == "update" else ""


# Notes on recurrent layers that run all steps on every rank: those that stay torch's own (packed sequences, projections).
#
#     cp: seq                  the layer's input is gathered, and each rank takes all steps of all rows
#     cp: batch@lstm > seq     an all-to-all before and after the layer: each rank takes all steps of some rows
#
# Others are `meshc::rnn`, whose state is passed from rank to rank (`partition/turn_choice.py`).


def recurrent_notes(placed: PlacedModel) -> list[str]:
    """A note for each such layer and axis."""
    layers = {name: child for name, child in placed.request.module.named_modules() if isinstance(child, nn.RNNBase)}
    if not layers:
        return []
    along = _along_the_sequence(placed)
    work = defaultdict[tuple[str, str], float](float)
    for node, chosen in placed.require_assignment().chosen.items():
        record = records(node)[0]
        if record.source.module in layers and record.phase == "forward" and is_product(node):
            used = {axis for axes in chosen.values() for axis in axes}
            for axis in (axis for axis, size in placed.sizes.items() if size > 1 and axis in along - used):
                work[record.source.module, axis] += flops(node)
    return [
        f"{name} ({type(layers[name]).__name__}) takes one step after another: its input is gathered over {axis}, and each of "
        f"{placed.sizes[axis]} ranks takes all steps of all rows, {total / 1e9:,.3g} GFLOP forward; `{axis}: batch@{name} > seq` lets each "
        "take those of its rows"
        for (name, axis), total in work.items()
    ]


def _along_the_sequence(placed: PlacedModel) -> set[str]:
    """Axes that split the sequence in any region."""
    named = {factor for factor, names in placed.names.also.items() if "seq" in names}
    found = interests(placed.plan, placed.names, list(placed.sizes))
    return {axis for axis, one in found.items() if any(region is None for factor in named for _, region in one.ranks.get(factor, ()))}
