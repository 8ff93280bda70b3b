"""Find factors: every dim of the global view as factors with names (`factorize.py` finds, `name_factors.py` names).

    mm: f32[6, 40]      becomes      mm: f32[batch 6, ffn 40]
"""

from __future__ import annotations

from meshc.ir import value_of
from meshc.ir.keys import key_of, kind_of, name_of
from meshc.optimizer.spec import GRADIENT, SUM
from meshc.passes.depth.counts import counts_of
from meshc.passes.depth.view import view_of
from meshc.passes.phases.compilation_phase import phase_fields
from meshc.passes.phases.factors import Value
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.place.batch import refuse_numbers_of_rows, refuse_other_joint
from meshc.passes.place.factorize import factorize
from meshc.passes.place.name_factors import name_factors


def find_factors(traced: TracedModel) -> PlacedModel:
    joint = traced.operators()
    factors = factorize(joint.graph, shared_factor_pairs(joint), counts_of(joint, traced.depth))
    ask = traced.request
    names = name_factors(joint.graph, factors, joint.inputs, ask.names, traced.model.output_tree.caches(), ask.joined)
    refuse_other_joint(ask, names.batch)
    refuse_numbers_of_rows(ask, factors, names.batch)
    view = view_of(joint, traced.depth)
    return PlacedModel(
        **phase_fields(traced.with_notes(*factors.dropped)), traced=traced, joint=joint, view=view, factors=factors, names=names
    )


# Pairs of values that share factors: a gradient and its parameter, a value before and after a step.


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
