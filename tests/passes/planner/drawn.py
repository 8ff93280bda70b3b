"""Random small problems of the planner's kind, and what is best of them by going through all choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

from meshc.passes.planner.cost_model import CostModel, Leg, Pick, ValueGroup
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.search_space import DecidedValue, Form, Reading

NOTHING: Any = None
"""What a model has of the graph that it comes from: these come from none."""
MILLI, GIGA = 1e-3, 1e9
"""Seconds and bytes are of the size that solvers' tolerances are made for."""


def drawn(seed: int, classes: int = 5) -> tuple[CostModel, MemoryModel]:
    """Classes that read each other, some changes shared, some forms partial, and bytes for everything."""
    random = np.random.default_rng(seed)
    own = [random.integers(0, 20, random.integers(2, 5)) * MILLI for _ in range(classes)]
    graph = Graph()
    nodes = [graph.call_function(torch.relu) for _ in own]
    model = CostModel(NOTHING, NOTHING, NOTHING, NOTHING, own)
    length = 3 * classes
    for maker in range(classes):
        readers = random.choice(classes, random.integers(1, 4))
        model.groups.append(_group(random, model, nodes, maker, [int(one) for one in readers], length))
    memory = MemoryModel.__new__(MemoryModel)
    memory._gaps, memory._parts, memory._known_spans = {}, {}, {}
    memory.model, memory.length, memory.fixed = model, length, 7 * GIGA
    memory.stored = [random.integers(0, 10, len(row)) * GIGA for row in own]
    return model, memory


def _group(random: np.random.Generator, model: CostModel, nodes: list[Node], maker: int, readers: list[int], length: int) -> ValueGroup:
    lies: list[Form] = [(((f"{at}",),), (("x", "sum"),) if random.random() < 0.3 else ()) for at in range(random.integers(1, 4))]
    wants: list[Form] = [*[form for form in lies if not form[1]], *[(((f"w{at}",),), ()) for at in range(random.integers(1, 4))]]
    same = np.array([[one == other for other in wants] for one in lies])
    price = np.where(same, 0.0, random.integers(0, 15, same.shape) * MILLI)
    settled = np.array([not form[1] for form in lies])
    gathers = (random.random(same.shape) < 0.4) & settled[:, None] & ~same
    start = int(random.integers(0, length // 2))
    readings = [
        Reading(nodes[reader], None, at, (), False, "", int(random.integers(start + 1, length - 1))) for at, reader in enumerate(readers)
    ]
    value = DecidedValue((nodes[maker], 0), nodes[maker], (), (), False, (8,), 2, "forward", start, readings=readings)
    phases = [str(random.choice(["forward", "backward"])) for _ in readers]
    legs = tuple(
        Leg(reader, random.integers(0, len(wants), len(model.own[reader])), phase, price, gathers, (at,))
        for at, (reader, phase) in enumerate(zip(readers, phases, strict=True))
    )
    sizes = random.integers(1, 30, len(lies)) * GIGA, random.integers(1, 30, len(wants)) * GIGA
    return ValueGroup((value,), 1, maker, random.integers(0, len(lies), len(model.own[maker])), tuple(lies), tuple(wants), legs, *sizes)


def choices(model: CostModel) -> Iterator[Pick]:
    yield from product(*(range(len(own)) for own in model.own))


def best(model: CostModel, allowed: Callable[[Pick], bool] = lambda _: True) -> float:
    return min((model.seconds(pick) for pick in choices(model) if allowed(pick)), default=np.inf)
