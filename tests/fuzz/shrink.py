"""Makes a failing case smaller: fewer axes, outputs and steps, a shorter plan, as long as it fails in the same way.

A step is taken out by putting an input of its result's shape in its place; what only it needed goes with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.fuzz.case import Case, How
from tests.fuzz.draw import pruned
from tests.fuzz.sketch import Leaf, Sketch, execute

Fails = Callable[["Case"], bool]


def shrink(case: Case, fails: Fails, seconds: float = 60.0) -> Case:
    """The smallest failing case found within the time."""
    end = time.monotonic() + seconds
    tried: set[Case] = set()
    while True:
        for smaller in candidates(case):
            if time.monotonic() > end:
                return case
            if smaller in tried:
                continue
            tried.add(smaller)
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, the greatest steps first."""
    sketch = case.sketch
    yield from _fewer_axes(case)  # first: it makes each further try cheaper
    for count in (len(sketch.outputs) // 2, 1):
        if count and count < len(sketch.outputs):
            for start in range(0, len(sketch.outputs), count):
                rest = sketch.outputs[:start] + sketch.outputs[start + count :]
                one = sketch.outputs[start : start + count]
                yield from _as_case(case, replace(sketch, outputs=one))
                yield from _as_case(case, replace(sketch, outputs=rest))
    for step in sketch.steps:  # what an output is made of, in its place
        if set(step.outs) & set(sketch.outputs):
            made = {leaf.name for leaf in sketch.leaves}
            earlier = [name for name in step.operands if name not in made]
            others = [name for name in sketch.outputs if name not in step.outs]
            if earlier or others:
                yield from _as_case(case, replace(sketch, outputs=tuple(dict.fromkeys([*others, *earlier]))))
    yield from _as_case(case, replace(sketch, parts=())) if sketch.parts else ()
    if case.train:
        yield replace(case, train=False, how=replace(case.how, microbatches=1, mean_of_parts=False))
    plainer = replace(case.how, microbatches=1, mean_of_parts=False), replace(case.how, inputs="global"), replace(case.how, remat=None)
    for how in (How(), *plainer):
        if how != case.how:
            yield replace(case, how=how)
    for size in (8, 4, 2, 1):
        if size <= len(sketch.steps):
            for start in range(0, len(sketch.steps), size):
                smaller = without(sketch, range(start, min(start + size, len(sketch.steps))))
                if smaller is not None:
                    yield from _as_case(case, smaller)
    for index in range(len(case.plan)):
        yield from _shorter_plans(case, index)
    for leaf in sketch.leaves:
        if leaf.kind == "parameter" or leaf.grad:
            name = leaf.name if leaf.kind == "input" else f"y{leaf.name}"
            plain = replace(leaf, kind="input", grad=False, name=name)
            leaves = tuple(plain if x is leaf else x for x in sketch.leaves)
            yield from _as_case(case, renamed(replace(sketch, leaves=leaves), leaf.name, name))


def _fewer_axes(case: Case) -> Iterator[Case]:
    axes = case.mesh.split(",")
    for axis in axes if len(axes) > 1 else ():
        name = axis.split("=")[0]
        plan = tuple(line for line in case.plan if not line.startswith(f"{name}: "))
        if name != "dp" or case.how.inputs == "global":
            yield replace(case, mesh=",".join(other for other in axes if other != axis), plan=plan)


def _as_case(case: Case, sketch: Sketch) -> Iterator[Case]:
    sketch = pruned(sketch)
    if case.train and not sketch.of_kind("parameter"):
        return  # there is nothing to train
    if sketch.outputs and sketch.size < case.sketch.size or sketch != case.sketch:
        yield replace(case, sketch=sketch)


def _shorter_plans(case: Case, index: int) -> Iterator[Case]:
    line = case.plan[index]
    if line.startswith("pin"):
        yield replace(case, plan=case.plan[:index] + case.plan[index + 1 :])
        return
    axis, _, entry = line.partition(": ")
    terms, _, stored = entry.partition("; ")
    if terms == "-":
        return
    shorter = [f"{axis}: -", *([f"{axis}: {terms}"] if stored else [])]
    separators = [" > " if " > " in terms else ", "]
    pieces = terms.split(separators[0])
    for skip in range(len(pieces)):
        rest = separators[0].join(pieces[:skip] + pieces[skip + 1 :])
        if rest:
            shorter.append(f"{axis}: {rest}" + (f"; {stored}" if stored else ""))
    for text in shorter:
        yield replace(case, plan=(*case.plan[:index], text, *case.plan[index + 1 :]))


def renamed(sketch: Sketch, old: str, new: str) -> Sketch:
    steps = tuple(replace(step, operands=tuple(new if x == old else x for x in step.operands)) for step in sketch.steps)
    return replace(sketch, steps=steps, outputs=tuple(new if x == old else x for x in sketch.outputs))


def without(sketch: Sketch, span: range) -> Sketch | None:
    """Inputs in the place of the results of these steps."""
    try:
        with torch.no_grad():
            env = execute(sketch, {leaf.name: leaf.value() for leaf in sketch.leaves})
    except RuntimeError:
        return None
    gone = [name for index in span for name in sketch.steps[index].outs]
    leaves = list(sketch.leaves)
    names = {}
    for name in gone:
        value = env[name]
        high = int(value.max()) + 1 if value.dtype == torch.int64 and value.numel() else 1
        low = min(int(value.min()), 0) if value.dtype == torch.int64 and value.numel() else 0
        kind = str(value.dtype).removeprefix("torch.")
        names[name] = f"y{name}"
        leaves.append(Leaf(f"y{name}", "input", tuple(value.shape), kind, low, max(high, 1), False, len(leaves)))
    parts, start = [], 0
    for count in sketch.parts:
        parts.append(count - len(set(range(start, start + count)) & set(span)))
        start += count
    steps = tuple(
        replace(step, operands=tuple(names.get(x, x) for x in step.operands))
        for index, step in enumerate(sketch.steps)
        if index not in span
    )
    outputs = tuple(dict.fromkeys(name for name in sketch.outputs if name not in names))
    if not outputs:
        return None
    return replace(sketch, leaves=tuple(leaves), steps=steps, outputs=outputs, parts=tuple(parts) if sum(parts) else ())
