"""Annotate: the plan's words as factor classes, pins and storage, with notes; everything that does not fit is refused together.

    tp: heads, ffn, vocab                                  classes 7, 9 (heads), 11 (ffn), 3 (vocab)
    pin *.up_proj.weight: ffn/tp, _            becomes     value model.layers.0.mlp.up_proj.weight: dim 0 split by tp

A factor that a role's recipe names and the model does not have is dropped with a note; one that the user wrote by hand is an error. Notes
report an axis that is larger than anything it may split, which leaves ranks without work, and an axis whose only factors have size 1 and
could not be opened (`one_row`), where ranks do the same work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Final

import torch

from meshc.ir import records
from meshc.ir.mesh import Axis
from meshc.ops import grouped_mm as _grouped  # noqa: F401 - registers its operators
from meshc.passes.phases.placed_model import Pins, PlacedModel
from meshc.passes.place.pins import Pinning
from meshc.passes.place.resolve_operator_pins import operator_pins
from meshc.passes.place.store_lines import store_lines
from meshc.plan.entries import AxisEntry
from meshc.plan.expert_group_counts import EXPERTS
from meshc.plan.plan_faults import refuse_faults

NO_EXPERTS: Final = (
    "the model has no routed experts there that are traced in groups (those of transformers are, and modules in a loop as docs/experts.md "
    "has them)"
)
SHOWN: Final = 3
"""Number of the model's lines that an error names."""
OTHERS: Final = "use these ranks as dp or tp, or write what they take instead, as in `ep: batch`"
SORTED: Final = (torch.ops.meshc.grouped_mm.default, torch.ops.aten._grouped_mm.default)
"""Products of rows that a model has sorted by expert itself: the number of rows of each expert is data, so no axis can split them."""


def annotate(placed: PlacedModel) -> PlacedModel:
    """The phase with pins and storage by the plan; raises PlanError with every fault found."""
    notes, faults = _unknown_factors(placed)
    pinning = Pinning(placed)
    faults += pinning.apply()
    stored, more = store_lines(placed, pinning.names)
    told, others = operator_pins(placed, pinning)
    faults += [*more, *others]
    refuse_faults("the plan does not fit this model", faults)
    pins = Pins(pinning.values, pinning.storage, pinning.spread, stored, told)
    placed = replace(placed, names=pinning.names, pins=pins)
    return placed.with_notes(*notes, *_large_axes(placed))


def _factors_by_name(placed: PlacedModel) -> dict[str, set[int]]:
    known = defaultdict[str, set[int]](set)
    for factor, names in placed.names.also.items():
        for name in names:
            known[name].add(factor)
    return known


def _unknown_factors(placed: PlacedModel) -> tuple[list[str], list[str]]:
    """Notes on factors that recipes name, and faults for factors that the user names, where the model has none of that name."""
    known = _factors_by_name(placed)
    notes, faults = [], []
    for entry in placed.plan.axes:
        for term in entry.terms:
            if term.rest is not None:  # `split_axes` has made two axes of the entries of a plan
                faults.append(f"{entry.where}: {term} takes an axis apart, which is done before a model is placed; write two axes")
            elif any(map(term.covers, (*known, *placed.names.ones))):
                continue
            elif term.factor == EXPERTS and placed.mesh.size(entry.axis) > 1:
                faults.append(f"{entry.where}: {_no_experts(placed)}")
            elif entry.source != "hand":
                notes.append(f"{entry.axis}: this model has no {term.factor}, so {entry.source} goes without it")
            else:
                close = get_close_matches(term.factor, known, 3)
                plain = ", ".join(sorted(name for name in known if "." not in name))
                hint = f"did you mean {', '.join(close)}?" if close else f"program.factors() lists what can be named: {plain}"
                faults.append(f"{entry.where}: the model has no factor {term.factor!r}; {hint}")
    return notes, faults


def _no_experts(placed: PlacedModel) -> str:
    """Why no axis can split experts, with the lines of the model's products of sorted rows."""
    calls = [records(node)[0].source for node in placed.joint.graph.nodes if node.target in SORTED]
    lines = dict.fromkeys(f"{source} `{source.code}`" if source.code else str(source) for source in calls)
    if not lines:
        return f"{NO_EXPERTS}\n    what to do: {OTHERS}"
    more = f", and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return (
        f"the model multiplies rows that it has sorted by expert, whose runs no axis splits: {', '.join(list(lines)[:SHOWN])}{more}\n"
        f"    what to do: give experts as modules in a loop, which is traced as one product (docs/experts.md); or {OTHERS}"
    )


def idle(placed: PlacedModel) -> dict[str, AxisEntry]:
    """Axes of several ranks whose entries name dims of size 1 only."""
    return {axis.name: entry for axis, entry, sizes, ones in _splittable(placed) if ones and not sizes}


def _splittable(placed: PlacedModel) -> Iterator[tuple[Axis, AxisEntry, dict[str, int], list[str]]]:
    """For each axis of several ranks: its entry, the factors it could split as name -> largest size, and the names of dims of size 1."""
    known = _factors_by_name(placed)
    for axis in placed.mesh.axes:
        entry = placed.plan.entry(axis.name)
        if entry is None or axis.size == 1:
            continue
        named = {name for name in (*known, *placed.names.ones) if any(term.covers(name) for term in entry.terms)}
        sizes = {
            name: max(placed.real(placed.factors.size[factor]) for factor in factors) for name, factors in known.items() if name in named
        }
        yield axis, entry, sizes, sorted(named & placed.names.ones)


def _large_axes(placed: PlacedModel) -> list[str]:
    """Notes on axes larger than anything that their entries could split."""
    notes = []
    for axis, _, sizes, ones in _splittable(placed):
        if ones and not sizes:
            why = f"\n  why the batch of 1 is not padded: {placed.kept_whole}" if placed.kept_whole else ""
            notes.append(
                f"axis {axis.name} has nothing to split ({', '.join(f'{name} 1' for name in ones)}): each of its {axis.size} ranks "
                f"does the whole work; give it a larger factor in the plan, or larger inputs{why}"
            )
        largest = max(sizes.values(), default=0)
        if 0 < largest < axis.size:
            found = ", ".join(f"{name} {size}" for name, size in sizes.items()) + " in a microbatch" * (placed.parts is not None)
            notes.append(
                f"axis {axis.name} has {axis.size} ranks, more than anything it could split ({found}): {axis.size - largest} of them hold "
                f"nothing but padding; make it at most {largest}, or give it a larger factor in the plan"
            )
    return notes
