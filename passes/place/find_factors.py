"""Find factors: every dim of the global view as factors with names (`factorize.py` finds, `name_factors.py` names).

    mm: f32[6, 40]      becomes      mm: f32[batch 6, ffn 40]
"""

from __future__ import annotations

from meshc.passes.depth.counts import counts_of
from meshc.passes.depth.view import view_of
from meshc.passes.phases.compilation_phase import phase_fields
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.place.batch import refuse_numbers_of_rows, refuse_other_joint
from meshc.passes.place.factorize import factorize
from meshc.passes.place.name_factors import name_factors
from meshc.passes.place.shared_factors import shared_factor_pairs


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
