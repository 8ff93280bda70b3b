"""A context in which a model's lists hold the captured layers only.

    model.layers  [0, 1, 2, ..., 31]      inside      model.layers  [0, 1, 2, 31]

Only the lists are cut: modules, configuration, parameters and the optimizer are unchanged. Caches of stock models get an entry for each
captured layer, where these are the first of the list: layers index the cache by their own numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from meshc.frontend.libraries.stock_caches import fewer_layers
from meshc.passes.phases.captured_depth import Depth


@contextlib.contextmanager
def slice_layers(module: nn.Module, depth: Depth | None) -> Iterator[None]:
    """Captured layers are renumbered. Does nothing if all layers are captured."""
    captured = {} if depth is None else depth.captured
    lists = [(module.get_submodule(path), numbers) for path, numbers in captured.items()]
    whole = [each._modules for each, _ in lists]
    # number of layers -> number of their caches that are used
    caches = {len(layers): len(numbers) for layers, numbers in zip(whole, captured.values(), strict=True)}
    front = len(caches) == len(whole) and all(numbers == tuple(range(len(numbers))) for numbers in captured.values())
    try:
        for (each, numbers), layers in zip(lists, whole, strict=True):
            found = list(layers.values())
            each.__dict__["_modules"] = {str(place): found[number] for place, number in enumerate(numbers)}
        with fewer_layers(caches if front else {}):
            yield
    finally:
        for (each, _), layers in zip(lists, whole, strict=True):
            each.__dict__["_modules"] = layers
