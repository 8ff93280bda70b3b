"""Joint: the graph of operators with its backward, its loss and the draws of its microbatches (`differentiate` makes the graph)."""

from __future__ import annotations

from meshc.passes.phases.draft import Draft
from meshc.passes.trace import differentiate, parts, update


def make_joint(draft: Draft) -> Draft:
    assert draft.traced is not None
    draft.notes += draft.traced.notes
    draft.graph, draft.inputs, draft.outputs, draft.constants = differentiate.differentiate(draft.traced)
    if draft.traced.symbols is not None:
        draft.dynamic, draft.constraints = draft.traced.symbols.constraints(draft.traced.fake_mode.shape_env, draft.dynamic)
    if draft.request.train:
        draft = update.close_loss(draft)
    if draft.parts is not None:
        parts.number_draws(draft.the_graph(), draft.parts)
        parts.mark_sums(draft, draft.parts.count)
    return draft
