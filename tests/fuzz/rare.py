"""Plans of what is rare among random ones: in each an axis takes, first of all, something that the program has of these.

    zigzag   what queries and keys under a causal mask run over: keys pass round, in zigzag order
    ring     what queries and keys run over: keys pass round
    keys     what keys run over and queries do not: each rank looks at its own keys
    experts  experts that tokens choose
    steps    what a recurrence steps along: ranks take turns
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from meshc.ir import records
from meshc.ir.keys import key_of
from meshc.ir.mesh import Mesh
from meshc.passes.phases.factors import Instance
from meshc.passes.phases.placed_model import PlacedModel
from meshc.rules.attention import shape_of_mask
from tests.fuzz.case import How
from tests.fuzz.plans import first_on
from tests.fuzz.sketch import Sketch

WEIGHTS = {"zigzag": 3, "keys": 3, "experts": 2, "ring": 1, "steps": 1}
"""How often each kind is taken by a program that has all of them."""

ROUTED = "routed"
"""The entry of the menu whose third operand is the experts' matrices."""


def rare(sketch: Sketch, placed: PlacedModel) -> dict[str, list[int]]:
    """The factors of each kind that a program has, in the order of the program."""
    found: dict[str, list[int]] = {}
    for kind, factor in _factors(sketch, placed):
        if factor in placed.names.of and placed.factors.size[factor] > 1 and factor not in found.setdefault(kind, []):
            found[kind].append(factor)
    return {kind: factors for kind, factors in found.items() if factors}


def _factors(sketch: Sketch, placed: PlacedModel) -> Iterator[tuple[str, int]]:
    for node, instance in placed.factors.instances.items():
        if records(node)[0].phase == "forward":
            yield from _of_attention(instance)
            if instance.rule.steps is not None and (instance.rule.steps.letter, 0) in instance.factor:
                yield "steps", instance.factor[instance.rule.steps.letter, 0]
    entering = placed.joint.placeholders()
    for step in sketch.steps:
        for key in (key_of("parameter", step.operands[2]), key_of("input", step.operands[2])) if step.op == ROUTED else ():
            if key in entering:
                yield from (("experts", factor) for factor in placed.factors.dims[(entering[key], 0)][0][:1])


def _of_attention(instance: Instance) -> Iterator[tuple[str, int]]:
    for letter, passing in instance.rule.rings.items():
        queries, keys = (instance.factor.get((one, 0)) for one in (letter, passing.letter))
        if keys is not None and queries == keys:
            yield "zigzag" if passing.zigzag and shape_of_mask(instance.node)[0] else "ring", keys
        elif keys is not None and passing.apart:
            yield "keys", keys


def directed(chance: random.Random, sketch: Sketch, placed: PlacedModel, mesh: Mesh, plan: str, how: How) -> tuple[str, How]:
    """A plan and how it is compiled, in which one axis takes something rare; as they were for a program that has nothing of it."""
    found = rare(sketch, placed)
    if not found:
        return plan, how
    (kind,) = chance.choices(sorted(found), [WEIGHTS[kind] for kind in sorted(found)])
    factor = chance.choice(found[kind])
    fitting = [at for at, axis in enumerate(mesh.axes) if axis.size <= placed.factors.size[factor]]
    if not fitting:
        return plan, how
    at, name = chance.choice(fitting), placed.names.of[factor]
    lines = [line for line in plan.split("\n") if not line.startswith("pin")]
    lines = [first_on(chance, line, name) if index == at else _without(line, name) for index, line in enumerate(lines)]
    asked = {"zigzag": "zigzag", "ring": "ring", "keys": None}
    return "\n".join(lines), replace(how, attention=asked.get(kind, how.attention))


def _without(line: str, name: str) -> str:
    """The line of another axis, which leaves that factor alone."""
    axis, _, rest = line.partition(": ")
    terms, *stored = rest.split("; ")
    kept = " > ".join(", ".join(t for t in rank.split(", ") if t.partition("@")[0] != name) for rank in terms.split(" > "))
    kept = " > ".join(rank for rank in kept.split(" > ") if rank)
    return "; ".join([f"{axis}: {kept or '-'}", *stored])
