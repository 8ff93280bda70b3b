"""Program compiled from a request: the passes in order, and the searches where there is a choice."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from meshc.errors import ArtifactError, CaptureError, CompileError, PlanError
from meshc.frontend.compilation_cleanup import clean_up_compilation
from meshc.frontend.dynamic_dims import DynamicDims
from meshc.frontend.faults import phase as part
from meshc.frontend.skipped_work import fewer_collections
from meshc.ir import calls
from meshc.lazy_module import LazyModule
from meshc.passes import pipeline
from meshc.passes.depth.unequal import Unequal
from meshc.passes.driver.compile_at_depth import is_depth_valid, run_at_depth
from meshc.passes.driver.joined_batch import run_with_joined_batch
from meshc.passes.driver.pass_memo import PassMemo, run_before_recompute, run_to_partition
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compilation_phase import begin as outset_of
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.place import axis_flops
from meshc.passes.place.batch import refuse_other_joint
from meshc.passes.place.one_row import begin_with_open_rows, compare, rows_to_open, settle, why_whole
from meshc.passes.trace import mean_of_parts
from meshc.plan.expert_group_counts import splits
from meshc.plan.plan import open_axes
from meshc.program import instance
from meshc.program.program import Info, PlainProgram
from meshc.text.allowed_operators import refusal, spelling

if TYPE_CHECKING:
    from meshc.passes.driver import choose, choose_formats, pass_replay, pipeline_search, search_errors, within_budget
    from meshc.passes.lower import specialise
    from meshc.passes.stages import pipeline_memory, write_chunks
else:  # imported for programs with a choice, a budget or stages, and for errors
    choose = LazyModule("meshc.passes.driver.choose")
    choose_formats = LazyModule("meshc.passes.driver.choose_formats")
    pass_replay = LazyModule("meshc.passes.driver.pass_replay")
    pipeline_search = LazyModule("meshc.passes.driver.pipeline_search")
    search_errors = LazyModule("meshc.passes.driver.search_errors")
    within_budget = LazyModule("meshc.passes.driver.within_budget")
    specialise = LazyModule("meshc.passes.lower.specialise")
    pipeline_memory = LazyModule("meshc.passes.stages.pipeline_memory")
    write_chunks = LazyModule("meshc.passes.stages.write_chunks")



def compile_program(request: Request, hook: Hook | None = None, traced: TracedModel | None = None) -> tuple[PlainProgram, LoweredProgram]:
    """The program of `request`, by all passes, or by the passes after the trace if `traced` is given. `hook(name, phase)` is called after
    each pass (dumps, verification). Raises MeshcError and nothing else, but for errors of a hook."""
    if outset_of(request).plan.leaves_formats_open:
        assert traced is None
        request, notes = choose_formats.settle_formats(request)
        program, left = compile_program(request, hook)
        return replace(program, notes=[*program.notes, *notes]), left.with_notes(*notes)
    with clean_up_compilation(), fewer_collections():
        if traced is None:
            return run_with_joined_batch(request, partial(_compile_request, hook), _whole_forward)
        assert replace(request, optimizer=None) == replace(traced.request, optimizer=None)
        if is_depth_valid(traced, request):
            with contextlib.suppress(Unequal):
                return _compile_trace(traced.copy_for_request(request), hook)
        return compile_program(request.having(depth="whole"), hook)


def _compile_request(hook: Hook | None, request: Request) -> tuple[PlainProgram, LoweredProgram]:
    return run_at_depth(lambda outset, told: _compile_trace(_trace_outset(outset, told), told), request, hook)


def _compile_trace(
    traced: TracedModel, hook: Hook | None, following: pass_replay.PassReplay | None = None
) -> tuple[PlainProgram, LoweredProgram]:
    try:
        return _compile_factors(update_and_factorize(traced, hook), hook, following)
    except search_errors.NothingFits as error:
        raise error.with_changes_tried() from None


def _compile_factors(
    placed: PlacedModel, hook: Hook | None, following: pass_replay.PassReplay | None = None
) -> tuple[PlainProgram, LoweredProgram]:
    placed = run_pass(pipeline.SPLIT_AXES, placed, hook)
    if placed.depth is not None:
        if rows_to_open(placed) is not None:
            raise Unequal("its batch has one row, which is to be split")
        return _compile_by_plan(placed, hook, following)
    try:
        again = _open_rows(placed, hook)
        if again is not None:
            return _compile_by_plan(again, hook)
    except (ArtifactError, CaptureError, CompileError, PlanError) as error:
        placed = replace(placed, kept_whole=why_whole(error))
    return _compile_by_plan(placed, hook, following)


def trace(request: Request) -> TracedModel:
    """The trace of `request` before passes that depend on the optimizer, for several programs that differ in the optimizer alone. Tracing
    takes most of the time of a compilation."""
    with clean_up_compilation(), fewer_collections():
        return run_at_depth(_trace_outset, request, None)


def trace_open(request: Request, dims: DynamicDims) -> TracedModel:
    """The trace of `request` with the sizes `dims` open, before any pass reads them as numbers. That captured layers stand for all is
    proved at the request's own sizes."""

    def trace_with_dims(outset: CompilationPhase, hook: Hook | None) -> TracedModel:
        wanted = replace(outset, request=replace(outset.request, dynamic=dims))
        return run_passes(pipeline.OPERATORS, run_pass(pipeline.CAPTURE, wanted, hook), hook)

    with clean_up_compilation(), fewer_collections(), torch.set_grad_enabled(request.grad):
        return run_at_depth(trace_with_dims, request, None)


def compile_traced(
    traced: TracedModel, hook: Hook | None = None, following: pass_replay.PassReplay | None = None
) -> tuple[PlainProgram, LoweredProgram] | None:
    """The program by the passes after the trace; None if the captured layers do not stand for all at its sizes. `following`: the replay of
    these passes at other sizes."""
    with clean_up_compilation(), fewer_collections():
        if not is_depth_valid(traced, traced.request):
            return None
        with contextlib.suppress(Unequal):
            return _compile_trace(traced, hook, following)
    return None


def partition_traced(traced: TracedModel) -> LoweredProgram:
    """The passes after the trace up to `partition`, for a request that leaves nothing open."""
    with fewer_collections():
        return run_to_partition(run_pass(pipeline.SPLIT_AXES, update_and_factorize(traced)), None)


def place(request: Request) -> PlacedModel:
    """The model with its factors, before passes that read the mesh or the plan, for `compile_for_mesh`."""
    with clean_up_compilation(), fewer_collections():
        return run_with_joined_batch(request, _place_request, _whole_forward)


def _place_request(request: Request) -> PlacedModel:
    return run_at_depth(lambda outset, hook: update_and_factorize(_trace_outset(outset, hook), hook), request, None)


def compile_for_mesh(placed: PlacedModel, request: Request) -> tuple[PlainProgram, LoweredProgram]:
    """The program of a placed model on the mesh and by the plan of `request`."""
    wanted = outset_of(request)
    with clean_up_compilation(), fewer_collections():
        other_groups = splits(wanted.plan, wanted.sizes) != splits(placed.plan, placed.sizes)
        if wanted.plan.leaves_formats_open:
            return compile_program(request)
        changing = [(plan.precisions, plan.sparsities) for plan in (wanted.plan, placed.plan)]
        if other_groups or changing[0] != changing[1]:
            return compile_program(request)
        if wanted.plan.compressions or placed.plan.compressions:  # into how many parts the batch is cut may depend on the mesh
            return compile_program(request)
        with contextlib.suppress(Unequal):
            return _compile_factors(placed.restart_for_request(request), None)
        return compile_program(request.having(depth="whole"))


def whole_view(request: Request) -> Joint:
    """The global view of a model with its update, all of its layers captured."""
    return run_passes(pipeline.COMPLETED, trace(request.having(depth="whole"))).operators()


def update_and_factorize(traced: TracedModel, hook: Hook | None = None) -> PlacedModel:
    """`traced` with its update, and with factors."""
    return run_pass(pipeline.FACTORIZE, run_passes(pipeline.COMPLETED, traced, hook), hook)


def lower_by_plan(placed: PlacedModel, hook: Hook | None = None) -> LoweredProgram:
    """The program by the request's plan; of a pipeline or with open axes, the best that a search finds."""
    request = _settle_microbatches(placed.request)
    placed = placed.with_request(request) if request is not placed.request else placed
    lower_once = partial(_lower_or_unchunk, begun=PassMemo(None))
    if open_axes(placed.plan):
        return choose.choose(placed, _within_budget, hook, lower_once)
    try:
        left = _within_budget(placed, hook)
    except pipeline_memory.DoesNotFit as error:
        raise search_errors.no_stages_fit(placed, error, lower_once) from None
    if left.request.options.budget is not None:
        search_errors.refuse_over_budget(placed, left, lower_once)
    return left


def _settle_microbatches(request: Request) -> Request:
    """`request` with its number of microbatches, where that follows from the rest of it."""
    if request.microbatches is None and request.mesh.pipeline_axis is None:
        return replace(request, microbatches=1)
    return request if request.microbatches is not None else pipeline_search.settle_microbatches(request)


def _within_budget(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
    """The program within the budget, if there is one; alike for a search and for its result as a plan, so that both give one program."""
    if placed.request.options.budget is None:
        return _lower_or_unchunk(placed, hook)
    return within_budget.lower_within_budget(placed, hook, partial(_lower_or_unchunk, begun=PassMemo()))


def _lower_or_unchunk(placed: PlacedModel, hook: Hook | None, begun: PassMemo | None = None) -> LoweredProgram:
    """The program by all passes after `factorize`. A head that cannot run in chunks runs whole, with a note. `begun`: memoised results."""
    try:
        return _lower_request(placed, hook, begun)
    except write_chunks.NotInChunks as why:
        whole = _lower_request(placed.restart_for_request(replace(placed.request, chunks=1)), hook, begun)
        return whole.with_notes(f"the head and loss run whole, and not in chunks: {why}")


def _lower_request(placed: PlacedModel, hook: Hook | None, begun: PassMemo | None) -> LoweredProgram:
    request = placed.request
    if request.mesh.pipeline_axis is not None and pipeline_search.has_choice(request):
        cut = pipeline_search.search_pipeline(placed, hook)
    else:
        cut = _recompute_and_cut(run_before_recompute(placed, hook) if begun is None else begun.run_before_recompute(placed, hook), hook)
    return run_passes(pipeline.LOWER, run_pass(pipeline.CUT, cut, hook), hook)


def _recompute_and_cut(grown: LoweredProgram, hook: Hook | None) -> LoweredProgram:
    return run_passes((pipeline.RECOMPUTE, *pipeline.PARTS, pipeline.STAGES), grown, hook)


def _lower_by_replay(placed: PlacedModel, hook: Hook | None, following: pass_replay.PassReplay) -> LoweredProgram:
    """As `lower_by_plan`, for a program without choices: the passes after `partition` are replayed if they can be."""

    def rest(left: LoweredProgram) -> LoweredProgram:
        cut = _recompute_and_cut(run_passes(pipeline.GROWN, left, hook), hook)
        return run_passes(pipeline.LOWER, run_pass(pipeline.CUT, cut, hook), hook)

    return following.lower(run_to_partition(placed, hook), rest)


def _trace_outset(outset: CompilationPhase, hook: Hook | None) -> TracedModel:
    if mean_of_parts.means(outset.request):
        with part("finding the batch"):
            forward = _whole_forward(outset.request)
            refuse_other_joint(outset.request, forward.names.batch)
            outset = replace(outset, parts=mean_of_parts.find_parts(forward, outset.request))
    return run_passes(pipeline.TRACE, run_pass(pipeline.CAPTURE, outset, hook), hook)


def _whole_forward(request: Request) -> PlacedModel:
    """The forward graph of the whole batch with its factors, for a step that is traced for one microbatch."""
    with torch.no_grad():
        return update_and_factorize(_trace_outset(outset_of(mean_of_parts.whole_forward(request)), None))


def _open_rows(placed: PlacedModel, hook: Hook | None) -> PlacedModel | None:
    """If the batch has one row that is to be split: the same model from a trace with that size open, once compared; else None."""
    rows = rows_to_open(placed)
    if rows is None:
        return None
    again = update_and_factorize(_trace_outset(begin_with_open_rows(placed.request, rows), hook), hook)
    with part("comparing one row with several"):
        compare(placed.traced, again.traced)
    return again


def _compile_by_plan(
    placed: PlacedModel, hook: Hook | None, following: pass_replay.PassReplay | None = None
) -> tuple[PlainProgram, LoweredProgram]:
    """The program by the passes that read the plan."""
    left = (
        _lower_by_replay(placed, hook, following)
        if following is not None and pass_replay.may_replay(placed)
        else lower_by_plan(placed, hook)
    )
    with part("putting the program together"):
        program = finish(left)
        if left.opened is None:
            return program, left
        return instance.substitute_sizes(program, left.opened.values), settle(left)


def specialise_backward(program: PlainProgram, left: LoweredProgram, received: Collection[str]) -> PlainProgram:
    """The program with a backward from the outputs named in `received` alone, and the forward stage of `program`.

    `left`: the phase that the last pass returned for `program`. Tangents of other outputs are no inputs of it, and gradients that depend on
    none of the received outputs are no outputs.
    """
    if left.backward is None:
        return program
    backward = run_passes(pipeline.LOWER, replace(left, stages={"backward": specialise.specialise(left.backward, received)})).stages[
        "backward"
    ]
    return replace(
        program,
        stages={**program.stages, "backward": backward},
        inputs=tuple(port for port in program.inputs if port.kind != "tangent" or port.name in received),
        outputs=tuple(port for port in program.outputs if port.kind != "gradient" or port.key in backward.outputs),
    )


def finish(lowered: LoweredProgram) -> PlainProgram:
    """The program of the last phase, with its notes and metadata."""
    request, placed = lowered.request, lowered.placed
    model, sparsity = lowered.model, placed.traced.sparsity
    return replace(
        lowered.as_program(),
        notes=[*lowered.notes, *_unsavable_notes(lowered)],
        dynamic=placed.traced.dynamic,
        constraints=placed.traced.constraints,
        info={
            "output_paths": model.output_tree.paths(), "random_calls": model.random_calls,
            "inputs": request.inputs, "outputs": request.outputs,
            "work": [row.plain() for row in axis_flops.with_divided(axis_flops.account(placed), lowered.divided)],
            **({"batch_mix": request.batch_mix} if lowered.parts is not None else {}),
            **({"sparse": {name: one.plain() for name, one in sorted(sparsity.items())}} if sparsity else {}),
            **_pipeline_info(lowered),
        },
    )  # fmt: skip


def _pipeline_info(lowered: LoweredProgram) -> Info:
    """Options for compiling the pipeline again; for a schedule given as a function, the lists that it returned."""
    request, pipeline = lowered.request, lowered.pipeline
    if pipeline is None:
        return {}
    given = request.options.pipeline
    made = given.schedule if given.schedule is None or isinstance(given.schedule, str) else str(pipeline.schedule)
    asked: Info = {"schedule": made, "pp_splits": list(given.splits or ())}
    if given.stages_per_rank is not None:
        asked["stages_per_rank"] = given.stages_per_rank
    return asked


def _unsavable_notes(lowered: LoweredProgram) -> list[str]:
    """A note for each operator that a saved program may not name."""
    targets = {node.target for stage in lowered.stages.values() for node in calls(stage.graph)}
    why = "is no operator that a saved program may name: this one runs here and cannot be saved"
    return [f"{name} {why}" for name in sorted(spelling(target) for target in targets if refusal(target) is not None)]
