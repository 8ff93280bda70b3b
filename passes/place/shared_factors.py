"""Pairs of values that share factors: a gradient and its parameter, a value before and after a step."""

from __future__ import annotations

from meshc.ir import value_of
from meshc.ir.keys import key_of, kind_of, name_of
from meshc.optimizer.spec import GRADIENT, SUM
from meshc.passes.phases.factors import Value
from meshc.passes.phases.traced_model import Joint


def shared_factor_pairs(joint: Joint) -> list[tuple[Value, Value]]:
    """Pairs of a gradient, accumulated sum, new value or tangent with the value that it belongs to."""
    inputs = joint.placeholders()
    results = {port.key: value_of(node) for port, node in zip(joint.outputs, joint.results(), strict=True)}
    pairs = []
    for key, value in results.items():
        kind, name = kind_of(key), name_of(key)
        other = inputs.get(key_of("parameter", name) if kind == "gradient" and ":" not in name else name if kind == "gradient" else key)
        if other is not None:
            pairs.append((value, (other, 0)))
        tangent = inputs.get(key_of("tangent", name))
        if kind == "output" and tangent is not None:
            pairs.append((value, (tangent, 0)))
    sums = [port for port in joint.inputs if port.kind == "state" and port.name in (f"{port.of}/{GRADIENT}", f"{port.of}/{SUM}")]
    return pairs + [((inputs[port.key], 0), (inputs[key_of("parameter", port.of)], 0)) for port in sums]
