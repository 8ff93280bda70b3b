"""Names with layer numbers as wildcards: `model.layers.*.mlp.up_proj`, `model.layers.*.mlp.up_proj.weight.0`."""

from __future__ import annotations

import re

from meshc.cost.divided_work import collapse_layers

_LAYER = re.compile(r"(?<![^.])\d+(?=\.\D)")


def operator_of_layers(name: str) -> str:
    """Name of an operator with a wildcard for the layer number."""
    module, _, rest = name.partition("/")
    return f"{collapse_layers(module)}/{rest}"


def factor_of_layers(name: str) -> str:
    """Name of a factor with a wildcard for the layer number; numbers at its end are those of dims."""
    return _LAYER.sub("*", name, count=1)
