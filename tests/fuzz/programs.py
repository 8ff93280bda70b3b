"""The program of a seed."""

from __future__ import annotations

import random

from tests.fuzz.draw import Drawer, steady
from tests.fuzz.menu import FAMILIES
from tests.fuzz.sketch import Sketch

ATTEMPTS = 400
LENGTHS = (5, 40)


def draw_program(seed: int) -> Sketch:
    """A program of 5 to 40 steps whose results are finite and steady; a function of the seed."""
    for attempt in range(100):
        sketch = _draw(random.Random(f"{seed}/{attempt}"))
        if sketch is not None and steady(sketch):
            return sketch
    raise RuntimeError(f"seed {seed} gives no program")


def _draw(chance: random.Random) -> Sketch | None:
    drawer = Drawer(chance, batched=chance.random() < 0.35)
    weights = [weight for weight, _ in FAMILIES]
    wanted = chance.randint(*LENGTHS)
    for _ in range(ATTEMPTS):
        (family,) = chance.choices([menu for _, menu in FAMILIES], weights)
        name = chance.choice(list(family))
        drawer.attempt(name, family[name])
        if len(drawer.steps) == wanted:
            break
    sketch = drawer.finish(loss=chance.random() < (0.5 if drawer.batch else 0.3))
    return sketch if sketch.outputs and len(sketch.steps) >= LENGTHS[0] else None
