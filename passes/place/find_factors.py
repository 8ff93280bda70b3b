"""Find factors: every dim of the global view as factors with names (`factorize.py` finds, `names.py` names).

    mm: f32[6, 40]      becomes      mm: f32[batch 6, ffn 40]
"""

from __future__ import annotations

from meshc.passes.depth.counts import counts_of
from meshc.passes.depth.view import view_of
from meshc.passes.phases.outset import carried
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.traced import Traced
from meshc.passes.place.alike import alike
from meshc.passes.place.batch import refuse_numbers_of_rows, refuse_other_joint
from meshc.passes.place.factorize import factorize
from meshc.passes.place.names import name_factors


def find_factors(traced: Traced) -> Placed:
    joint = traced.operators()
    factors = factorize(joint.graph, alike(joint), counts_of(joint, traced.depth))
    ask = traced.request
    names = name_factors(joint.graph, factors, joint.inputs, ask.names, traced.model.output_tree.caches(), ask.joined)
    refuse_other_joint(ask, names.batch)
    refuse_numbers_of_rows(ask, factors, names.batch)
    view = view_of(joint, traced.depth)
    return Placed(**carried(traced.noting(*factors.dropped)), traced=traced, joint=joint, view=view, factors=factors, names=names)
