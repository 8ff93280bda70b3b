"""The compiler's table of contents: every pass, in order, with the reason where its place is not obvious."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from meshc.errors import ArtifactError, CaptureError, CompileError, PlanError
from meshc.frontend.faults import phase
from meshc.frontend.leftovers import given_up
from meshc.frontend.spared import fewer_collections
from meshc.ir.spmd import MICROBATCH
from meshc.passes.driver.finish import finish
from meshc.passes.lower import collectives, emit, group_regions
from meshc.passes.lower.specialise import specialise
from meshc.passes.microbatches import cut, microbatch
from meshc.passes.partition.main_stage import make_main_stage
from meshc.passes.phases.draft import Draft, Request
from meshc.passes.place import annotate
from meshc.passes.place.alike import alike
from meshc.passes.place.assign import assign
from meshc.passes.place.factorize import factorize
from meshc.passes.place.names import name_factors
from meshc.passes.place.one_row import compare, opened, reopened, settle, why_whole
from meshc.passes.stages import cut_stages
from meshc.passes.stages.choose import choose_microbatches
from meshc.passes.stages.fit import DoesNotFit
from meshc.passes.trace import autocast, fold_masks, inline, parts, raise_ops, update
from meshc.passes.trace.capture import capture
from meshc.passes.trace.joint import make_joint
from meshc.plan.recipes import resolve
from meshc.program import instance
from meshc.program.program import Program

Pass = Callable[[Draft], Draft]


def _capture(draft: Draft) -> Draft:
    return capture(draft, _whole_forward)


def _whole_forward(request: Request) -> Draft:
    """The forward graph of the whole batch with its factors, for a step that is traced for one microbatch."""
    draft = Draft(parts.whole_forward(request))
    with torch.no_grad():
        for run in (_capture, _autocast, _inline, _raise, make_joint, _factorize):
            draft = run(draft)
    return draft


def _autocast(draft: Draft) -> Draft:
    assert draft.traced is not None
    draft.traced = autocast.lower_autocast(draft.traced, draft.mesh.device_type)
    return draft


def _inline(draft: Draft) -> Draft:
    assert draft.traced is not None
    draft.traced = inline.inline_checkpoints(draft.traced)
    return draft


def _raise(draft: Draft) -> Draft:
    assert draft.traced is not None
    draft.traced = raise_ops.raise_ops(draft.traced)
    draft.random_calls = draft.traced.random_calls
    return draft


def _factorize(draft: Draft) -> Draft:
    draft.factors = factorize(draft.the_graph(), alike(draft))
    draft.notes += draft.factors.dropped
    draft.names = name_factors(draft.the_graph(), draft.factors, draft.inputs, draft.request.names)
    return draft


@dataclass(frozen=True)
class Entry:
    name: str
    run: Pass


PASSES: tuple[Entry, ...] = (
    Entry("capture", _capture),
    Entry("autocast", _autocast),  # before raise: custom operators ignore autocast
    Entry("inline", _inline),  # before raise, which looks at every call
    Entry("raise", _raise),  # before AOTAutograd: one node forward and one backward for each composite
    Entry("differentiate", make_joint),
    Entry("fold_masks", fold_masks.fold_masks),  # once values are pure; before factorize, so that masks tie no dims together
    Entry("update", update.append_update),  # on the global view, so that norms and updates shard by the same rules as the model
    Entry("factorize", _factorize),
    Entry("annotate", annotate.annotate),
    Entry("propagate", assign),
    Entry("partition", make_main_stage),
    Entry("microbatch", microbatch.split_microbatches),  # after partition: a microbatch is one more axis there
    Entry("stages", cut_stages.cut_stages),  # likewise: a stage hands on what lies on its rank; after microbatch, whose parts it cuts
    Entry("cut", cut.cut_backward),  # likewise: what lies where decides what is saved
    Entry("collectives", collectives.schedule_collectives),  # once it is settled which stage a collective is in
    Entry("emit", emit.fuse_updates),
    Entry("regions", group_regions.group_regions),  # last: what stands in a region is what runs in it
)

PLANLESS = [entry.name for entry in PASSES].index("annotate")
"""How many passes come before the first that reads the plan."""
TRACED = [entry.name for entry in PASSES].index("update")
"""How many passes come before the first that reads the optimizer."""
STAGED = [entry.name for entry in PASSES].index("stages") + 1
"""How many have run once a pipeline's stages are known."""

Hook = Callable[[str, Draft], None]


def compile_program(request: Request, hook: Hook | None = None, traced: Draft | None = None) -> tuple[Program, Draft]:
    """Run all passes, or with `traced` those that are left. `hook(name, draft)` is called after each one (dumps, verification). Raises
    MeshcError and nothing else, but for what a hook raises."""
    with given_up(), fewer_collections():
        return _compiled(request, hook, traced)


def trace(request: Request) -> Draft:
    """What passes leave that know nothing of the optimizer, for several programs of requests that differ in it alone. Tracing is most of
    the time of a compilation."""
    with given_up(), fewer_collections():
        return run_passes(start(request), PASSES[:TRACED])


def _compiled(request: Request, hook: Hook | None, traced: Draft | None) -> tuple[Program, Draft]:
    if traced is None:
        draft = run_passes(start(request), PASSES[:PLANLESS], hook)
    else:
        draft = run_passes(traced.beside(request), PASSES[TRACED:PLANLESS], hook)
    rows = opened(draft)
    if rows is not None:
        try:
            again = run_passes(reopened(draft, rows), PASSES[:PLANLESS], hook)
            with phase("comparing one row with several"):
                compare(draft, again)
            return _planned(again, hook)
        except (ArtifactError, CaptureError, CompileError, PlanError) as error:
            draft.kept_whole = why_whole(error)
    return _planned(draft, hook)


def _planned(draft: Draft, hook: Hook | None) -> tuple[Program, Draft]:
    """The passes that read the plan."""
    request = draft.request
    if request.microbatches is None:
        begin = time.process_time()
        with phase("choosing the number of microbatches"):
            with_count = replace(request, microbatches=choose_microbatches(draft, lambda own: _fitting(own, PASSES[PLANLESS:STAGED])))
        draft = replace(draft, request=with_count, sizes=start(with_count).sizes)
        draft.seconds["choose"] = time.process_time() - begin
    draft = _fitting(draft, PASSES[PLANLESS:], hook)
    with phase("putting the program together"):
        program = finish(draft)
        if draft.opened is None:
            return program, draft
        return instance.put(program, draft.opened.values), settle(draft)


def _fitting(draft: Draft, entries: Sequence[Entry], hook: Hook | None = None) -> Draft:
    """The passes after `factorize`. If a pipeline does not fit with its parameters gathered once, they are gathered more often."""
    spare = draft.again(replace(draft.request, gather_once=False), seconds=draft.seconds)
    try:
        return run_passes(draft, entries, hook)
    except DoesNotFit:
        return run_passes(spare, entries, hook)


def start(request: Request) -> Draft:
    draft = Draft(request)
    draft.plan = resolve(request.plan, request.mesh)
    draft.sizes = {axis.name: axis.size for axis in request.mesh.axes}
    if request.count > 1:
        draft.sizes[MICROBATCH] = request.count
    return draft


def run_passes(draft: Draft, entries: Sequence[Entry], hook: Hook | None = None) -> Draft:
    for entry in entries:
        begin = time.process_time()
        with phase(f"the pass {entry.name}"):
            draft = entry.run(draft)
        draft.seconds[entry.name] = time.process_time() - begin
        if hook is not None:
            hook(entry.name, draft)
    return draft


def specialised(program: Program, draft: Draft, received: Collection[str]) -> Program:
    """The program whose backward begins at the outputs named in `received` alone; its forward stage is `program`'s own.

    `draft` is what the last pass left of `program`. Tangents of other outputs are no inputs any more, and gradients that depend on none of
    those received are no outputs.
    """
    if draft.backward is None:
        return program
    own = replace(draft, stages={"backward": specialise(draft.backward, received)}, seconds={})
    backward = run_passes(own, PASSES[[entry.name for entry in PASSES].index("cut") + 1 :]).stages["backward"]
    return replace(
        program,
        stages={**program.stages, "backward": backward},
        inputs=tuple(port for port in program.inputs if port.kind != "tangent" or port.name in received),
        outputs=tuple(port for port in program.outputs if port.kind != "gradient" or port.key in backward.outputs),
    )
