"""Assign: how every value lies. `propagate` decides; here it is told what the draft knows, and what it has decided is noted."""

from __future__ import annotations

from meshc.ir import records
from meshc.ir.mesh import DATA_ROLES, role
from meshc.ir.spmd import MICROBATCH
from meshc.passes.phases.draft import Draft
from meshc.passes.place.lay_ports import lay_ports
from meshc.passes.place.one_row import interests_of_rows
from meshc.passes.place.propagate import Interest, Propagator


def assign(draft: Draft) -> Draft:
    assert draft.factors is not None and draft.names is not None and draft.plan is not None
    propagator = Propagator(draft.the_graph(), draft.factors, draft.names, draft.plan, draft.sizes, draft.inputs)
    propagator.updates = draft.updates
    if draft.opened is not None:
        propagator.interest = interests_of_rows(draft, propagator.interest)
    propagator.fixed = draft.request.fixed
    propagator.pins = draft.pins
    propagator.storage_pins = draft.storage_pins
    propagator.spread_pins = draft.spread_pins
    if draft.parts is not None:
        propagator.interest[MICROBATCH] = Interest(MICROBATCH, {})  # the graph is one microbatch's already
    if draft.request.inputs == "local":
        propagator.local_batch = tuple(axis.name for axis in draft.mesh.axes if role(axis.name) in DATA_ROLES and axis.size > 1)
    draft.assignment = propagator.run()
    lay_ports(draft, propagator)
    _warn_replicated(draft)
    _note_idle_pins(draft)
    return draft


def _note_idle_pins(draft: Draft) -> None:
    """A value that every rank makes where it is used, in whatever part is asked for, lies nowhere that a pin could change."""
    assert draft.assignment is not None
    for (node, index), slots in draft.pins.items():
        if node.op == "call_function" and node in draft.assignment.free and any(slots.values()):
            modules = ", ".join(records(node)[index].returned_by) or node.name
            draft.notes.append(
                f"the pin of value:{modules} has no effect: nothing but integers goes into it, so each rank makes the part it uses"
            )


def _warn_replicated(draft: Draft) -> None:
    assert draft.assignment is not None
    seen: dict[str, tuple[int, int, str]] = {}
    for node in draft.assignment.replicated:
        size = 0
        for result in records(node):
            if result.dtype is not None:
                count = result.dtype.itemsize
                for extent in result.shape:
                    count *= draft.real(extent)
                size += count
        name = str(node.target).removesuffix(".default")
        times, total, where = seen.get(name, (0, 0, str(records(node)[0].source)))
        seen[name] = (times + 1, total + size, where)
    for name, (times, total, where) in seen.items():
        draft.notes.append(f"{name} has no rule: it runs whole on every rank ({times}x, {total:,} bytes of results), first at {where}")
