"""Slice: inside, lists of a model hold the layers that are captured, and no others; outside, the model is as it was.

    model.layers  [0, 1, 2, ..., 31]      inside      model.layers  [0, 1, 2, 31]

Only the lists are cut: modules, configuration, parameters and the optimizer stay what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from meshc.passes.phases.depth import Depth


@contextlib.contextmanager
def sliced(module: nn.Module, depth: Depth | None) -> Iterator[None]:
    """Layers that stay are numbered anew. Nothing happens where all are captured."""
    captured = {} if depth is None else depth.captured
    lists = [(module.get_submodule(path), numbers) for path, numbers in captured.items()]
    whole = [each._modules for each, _ in lists]
    try:
        for (each, numbers), layers in zip(lists, whole, strict=True):
            found = list(layers.values())
            each.__dict__["_modules"] = {str(place): found[number] for place, number in enumerate(numbers)}
        yield
    finally:
        for (each, _), layers in zip(lists, whole, strict=True):
            each.__dict__["_modules"] = layers
