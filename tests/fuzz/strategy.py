"""Cases as a hypothesis strategy: every choice of the drawer is one of hypothesis's, which makes smaller what fails.

Each step is a span of choices behind a flag that says whether there is one, so that hypothesis can leave steps out.
"""

from __future__ import annotations

import random

from hypothesis import assume, note
from hypothesis import strategies as st

from tests.fuzz.case import Case
from tests.fuzz.check import Outcome, captured
from tests.fuzz.draw import Drawer, steady
from tests.fuzz.menu import FAMILIES
from tests.fuzz.plans import draw_how, draw_mesh, draw_parts, draw_plan
from tests.fuzz.sketch import Sketch

FLAGS = 12
"""There is another step in FLAGS of FLAGS + 1 draws."""


def cases(most: int) -> st.SearchStrategy[Case]:
    """Cases whose programs have one to `most` steps and steady results."""
    return _cases(most)


@st.composite
def _cases(draw: st.DrawFn, most: int) -> Case:
    sketch = draw(sketches(most))
    assume(sketch.outputs)
    assume(steady(sketch))
    chance = draw(_chances())
    train = sketch.loss and bool(sketch.of_kind("parameter"))
    how = draw_parts(chance, sketch, train)
    ready = captured(sketch, train, how.parts)
    if isinstance(ready, Outcome):
        assume(ready.failed)
        case = Case(sketch, train, "a=2", ("a: -",), how)
    else:
        how = draw_how(chance, sketch, train, how, reparse=chance.random() > 0.8)
        mesh = draw_mesh(chance, sketch.batch if how.inputs == "local" else 0)
        case = Case(sketch, train, str(mesh), tuple(draw_plan(chance, ready.placed, mesh).split("\n")), how)
    note(case.script(f"{case.how}"))
    return case


@st.composite
def sketches(draw: st.DrawFn, most: int) -> Sketch:
    """Programs of up to `most` steps, steady or not."""
    chance = draw(_chances())
    drawer = Drawer(chance, batched=chance.random() > 0.65)
    while len(drawer.steps) < most and draw(st.integers(0, FLAGS)):
        draw(_step(drawer))
    drawer.chance = draw(_chances())
    return drawer.finish(loss=drawer.chance.random() > 0.7)


@st.composite
def _step(draw: st.DrawFn, drawer: Drawer) -> bool:
    """One more step, or none where the operator finds no operands."""
    drawer.chance = draw(_chances())
    (family,) = drawer.chance.choices([menu for _, menu in FAMILIES], [weight for weight, _ in FAMILIES])
    name = drawer.one(list(family))
    return drawer.attempt(name, family[name])


def _chances() -> st.SearchStrategy[random.Random]:
    return st.randoms(use_true_random=False)
