"""The mesh and the plan of a seed, for a program whose factors are known."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from meshc.ir import records
from meshc.ir.keys import kind_of, name_of
from meshc.ir.mesh import Mesh
from meshc.passes.phases.placed_model import PlacedModel
from meshc.plan.memory_lines import POLICIES
from tests.fuzz.case import How
from tests.fuzz.draw import steady
from tests.fuzz.sketch import Sketch

AXES = ("a", "b", "c")
RANKS = 8
SPLIT = ("seq", "experts")
"""Factors that plans take for long sequences and for routed experts."""


def draw_parts(chance: random.Random, sketch: Sketch, train: bool) -> How:
    """Whether a step is to be the mean of its microbatches, which its trace has to know: where that is a number to rely on."""
    counts = [count for count in (2, 3, 4) if sketch.batch and sketch.batch % count == 0]
    if not train or not counts or chance.random() < 0.3 or _crashes(sketch):
        return How()
    count = chance.choice(counts)
    rows = sketch.batch // count
    leaves = tuple(replace(leaf, shape=(rows, *leaf.shape[1:])) if leaf.kind == "input" else leaf for leaf in sketch.leaves)
    return How(count, mean_of_parts=True) if steady(replace(sketch, leaves=leaves)) else How()


def _crashes(sketch: Sketch) -> bool:
    """torch checks no shapes of a recurrent layer's weights: where they come of an input, fewer rows would end the process."""
    parameters = {leaf.name for leaf in sketch.of_kind("parameter")}
    return any(step.op == "recurrent" and not parameters.issuperset(step.operands[1:]) for step in sketch.steps)


def draw_how(chance: random.Random, sketch: Sketch, train: bool, how: How, reparse: bool) -> How:
    """What else a compilation is asked for; `how` is what the trace was."""
    if train and not how.mean_of_parts and chance.random() < 0.4:
        how = replace(how, microbatches=chance.randint(2, 4))
    # with both, a microbatch is a range of every rank's part: what it means depends on the mesh
    local = sketch.batch > 0 and not how.mean_of_parts and bool(sketch.of_kind("input")) and chance.random() < 0.4
    attends = any("attention" in step.op for step in sketch.steps)
    roll = chance.random() if attends else 1.0
    passes = None if roll >= 0.5 else "ring" if roll < 0.25 else "zigzag"
    remat = chance.choice(POLICIES[1:] if sketch.parts else POLICIES[1:3]) if chance.random() < 0.5 else None
    return replace(how, inputs="local" if local else "global", reparse=reparse, attention=passes, remat=remat)


def draw_mesh(chance: random.Random, batch: int = 0) -> Mesh:
    """One to three axes of 2 to 4 ranks, 8 ranks at most. Where ranks have parts of a `batch`, dp splits it evenly."""
    while True:
        sizes = [chance.choice((2, 2, 3, 4)) for _ in range(chance.choice((1, 1, 2, 2, 2, 3)))]
        if prod(sizes) > RANKS or batch and batch % sizes[0]:
            continue
        axes = ("dp" if batch else "a", *AXES[1:])
        return Mesh(",".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=False)))


def draw_plan(chance: random.Random, placed: PlacedModel, mesh: Mesh) -> str:
    """A line an axis, of the program's own factors, and now and then a pin. `placed` has its factors."""
    sizes = {name: placed.factors.size[factor] for factor, name in placed.names.of.items() if placed.factors.size[factor] > 1}
    found = {records(node)[0].source.module for node in placed.graph.nodes if node.op == "call_function"}
    modules = sorted(found - {""})
    lines = [_entry(chance, axis.name, axis.size, sizes, [*modules, "attention"]) for axis in mesh.axes]
    split = [name for name in SPLIT if name in sizes]
    if split and chance.random() < 0.5:  # what is rare among so many factors, and what most plans are about
        at, name = chance.randrange(len(lines)), chance.choice(split)
        lines[at] = first_on(chance, lines[at], name)
    if chance.random() < 0.25:
        lines += _pin(chance, placed, mesh)
    return "\n".join(lines)


def _entry(chance: random.Random, axis: str, ranks: int, sizes: Mapping[str, int], regions: list[str]) -> str:
    large = [name for name, size in sizes.items() if size >= ranks]
    if not large or chance.random() < 0.04:
        return f"{axis}: -"
    others = list(sizes)
    terms = [chance.choice(large)] + [chance.choice(others) for _ in range(chance.randint(0, 5))]
    terms = list(dict.fromkeys(terms))
    text = ""
    for index, term in enumerate(terms):
        region = f"@{chance.choice(regions)}" if index and chance.random() < 0.12 else ""
        text += (chance.choice((", ", " > ")) if index else "") + term + region
    stored = [what for what in ("params", "grads", "state") if chance.random() < 0.3]
    return f"{axis}: {text}" + (f"; store {', '.join(stored)}" if stored else "")


def first_on(chance: random.Random, line: str, name: str) -> str:
    """The line, with a factor that comes before its others."""
    axis, _, rest = line.partition(": ")
    terms, *stored = rest.split("; ")
    kept = [term for rank in terms.split(" > ") for term in rank.split(", ") if term not in (name, "-")]
    return "; ".join([f"{axis}: {name}" + (" > " + ", ".join(kept) if kept and chance.random() < 0.7 else ""), *stored])


def _pin(chance: random.Random, placed: PlacedModel, mesh: Mesh) -> list[str]:
    """One factor of a parameter or an input, on one or two axes or kept whole."""
    places = []
    for key, node in placed.joint.placeholders().items():
        kind, name = kind_of(key), name_of(key)
        if kind in ("parameter", "input"):
            rows = placed.factors.dims[(node, 0)]
            words = [[placed.names.of[factor] for factor in row] for row in rows]
            called = name if kind == "parameter" else key
            places += [(called, words, dim) for dim, row in enumerate(words) if row and len(set(row)) == len(row)]
    if not places:
        return []
    name, words, dim = chance.choice(places)
    parts = list(words[dim])
    chosen = chance.randrange(len(parts))
    axes = chance.sample([axis.name for axis in mesh.axes], chance.randint(0, min(2, len(mesh.axes))))
    parts[chosen] += "".join(f"/{axis}" for axis in axes) or "!"
    dims = ["_"] * len(words)
    dims[dim] = " * ".join(parts)
    return [f"pin {name}: {', '.join(dims)}" + "  only" * (chance.random() < 0.3)]
