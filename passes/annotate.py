"""Annotate: the plan's words become factor classes and pins; everything that does not fit is refused together.

    tp: heads, ffn, vocab                                  classes 7, 9 (heads), 11 (ffn), 3 (vocab)
    pin *.up_proj.weight: ffn/tp, _            becomes     value model.layers.0.mlp.up_proj.weight: dim 0 split by tp

A factor that a role's recipe names and the model does not have is dropped with a note; one that the user wrote by hand is an error.
"""

from __future__ import annotations

from difflib import get_close_matches

from torch.fx import Node

from meshc.errors import PlanError
from meshc.ir import records
from meshc.passes.draft import Draft
from meshc.plan import contradictions
from meshc.plan_entries import Pin

Value = tuple[Node, int]


def annotate(draft: Draft) -> Draft:
    """Fills `pins` (value -> (dim, position) -> axes) and `storage_pins`; raises PlanError with every fault found."""
    faults = [*_unknown_factors(draft), *_useless_axes(draft)]
    faults += _pins(draft)
    if faults:
        raise PlanError("the plan does not fit this model:\n  " + "\n  ".join(faults))
    return draft


def _known(draft: Draft) -> dict[str, set[int]]:
    assert draft.names is not None
    known: dict[str, set[int]] = {}
    for factor, names in draft.names.also.items():
        for name in names:
            known.setdefault(name, set()).add(factor)
    return known


def _unknown_factors(draft: Draft) -> list[str]:
    assert draft.plan is not None
    known = _known(draft)
    faults = []
    for entry in draft.plan.axes:
        for term in entry.terms:
            if any(term.covers(name) for name in known):
                continue
            if entry.source != "hand":
                draft.notes.append(f"{entry.axis}: this model has no {term.factor}, so {entry.source} goes without it")
                continue
            close = get_close_matches(term.factor, known, 3)
            hint = f"did you mean {', '.join(close)}?" if close else "program.factors() lists what can be named: " + ", ".join(
                sorted(name for name in known if "." not in name)
            )
            faults.append(f"{entry.where}: the model has no factor {term.factor!r}; {hint}")
    return faults


def _useless_axes(draft: Draft) -> list[str]:
    """An axis larger than anything that its entry could split would leave ranks without work."""
    assert draft.plan is not None and draft.names is not None and draft.factors is not None
    faults = []
    known = _known(draft)
    for axis in draft.mesh.axes:
        entry = draft.plan.entry(axis.name)
        if entry is None or axis.size == 1:
            continue
        sizes = {
            name: max(draft.factors.size[factor] for factor in factors)
            for name, factors in known.items()
            if any(term.covers(name) for term in entry.terms)
        }
        if sizes and max(sizes.values()) < axis.size:
            found = ", ".join(f"{name} {size}" for name, size in sizes.items()) + " in a microbatch" * (draft.parts is not None)
            faults.append(
                f"axis {axis.name} has {axis.size} ranks, more than anything it could split ({found}); "
                f"make it at most {max(sizes.values())}, or give it a larger factor in the plan"
            )
    return faults


def _pins(draft: Draft) -> list[str]:
    assert draft.plan is not None
    faults: list[str] = []
    used: set[int] = set()
    for name, value, kind in _pinnable(draft):
        pins = [pin for pin in draft.plan.pins if pin.matches(name)]
        used |= {id(pin) for pin in pins}
        faults += contradictions(pins)
        for pin in pins:
            problem = _apply(draft, pin, name, value, kind)
            if problem:
                faults.append(problem)
    for pin in draft.plan.pins:
        if id(pin) not in used:
            names = [name for name, _, _ in _pinnable(draft)]
            close = get_close_matches(pin.pattern, names, 3, 0.4)
            faults.append(f"{pin.where}: {pin.pattern!r} matches nothing" + (f"; did you mean {', '.join(close)}?" if close else ""))
    return faults


def _pinnable(draft: Draft) -> list[tuple[str, Value, str]]:
    """(name, value, kind) of everything a pin may name."""
    found: list[tuple[str, Value, str]] = []
    for key, node in draft.placeholders().items():
        kind, name = key.split(":", 1)
        if kind == "parameter":
            found.append((name, (node, 0), kind))
        elif kind == "input":
            found.append((f"input:{name}", (node, 0), kind))
    last: dict[str, Value] = {}
    assert draft.factors is not None
    for node, instance in draft.factors.instances.items():
        module = records(node)[0].source.module
        if module and records(node)[0].phase == "forward" and instance.kind not in ("layout", "unknown"):
            last[module] = (node, 0)
    found += [(f"value:{module}", value, "value") for module, value in last.items()]
    return found


def _apply(draft: Draft, pin: Pin, name: str, value: Value, kind: str) -> str | None:
    assert draft.factors is not None and draft.names is not None
    dims = draft.factors.dims[value]
    if len(pin.dims) != len(dims):
        return f"{pin.where}: {name} has {len(dims)} dims, the pin has {len(pin.dims)}"
    chosen: dict[tuple[int, int], tuple[str, ...]] = {}
    for dim, (wanted, row) in enumerate(zip(pin.dims, dims, strict=True)):
        for part in wanted.factors:
            matches = [p for p, factor in enumerate(row) if part.factor in draft.names.also[factor] | {draft.names.of[factor]}]
            if not matches and len(row) == len(wanted.factors) == 1:
                matches = [0]
                draft.names.also[row[0]].add(part.factor)
            if not matches:
                have = " * ".join(draft.names.of[factor] for factor in row) or "1"
                return f"{pin.where}: dim {dim} of {name} is {have}, it has no factor {part.factor!r}"
            if part.axes or part.whole:
                chosen[(dim, matches[0])] = part.axes
    for (dim, position), axes in chosen.items():
        for axis in axes:
            if axis not in draft.sizes:
                return f"{pin.where}: the mesh has no axis {axis!r}"
            size = draft.factors.size[dims[dim][position]]
            if draft.sizes[axis] > size:
                return f"{pin.where}: axis {axis} has {draft.sizes[axis]} ranks, but that factor of {name} has size {size}"
        if not pin.only and axes:
            draft.spread_pins.setdefault(dims[dim][position], axes)
    if kind == "parameter":
        draft.storage_pins[name] = chosen
    draft.pins[value] = chosen
    return None
