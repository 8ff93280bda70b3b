"""Pass pipeline: all passes in order, each with the reason for its position where that is not obvious.

    request  ── capture ──>  traced  ── factorize ──>  placed  ── partition ──>  lowered  ──>  program

`passes/driver/compile_program.py` runs the passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from meshc.ir import spmd
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Pass
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import TracedModel
from meshc.plan.memory_lines import PARAMS, STATE, STORED

meshc = torch.ops.meshc

LoweredPass: TypeAlias = Pass[LoweredProgram, LoweredProgram]


def _pass(pass_name: str, path: str, why: str = "", when: Callable[[Any], bool] | None = None) -> Pass[Any, Any]:
    """The pass of the function at `path`, `room.module:function` of `meshc.passes`, which is imported when the pass first runs."""
    module, _, name = path.partition(":")

    def run(phase: Any) -> Any:
        return getattr(importlib.import_module(f"meshc.passes.{module}"), name)(phase)

    run.__name__ = path
    return Pass(pass_name, run, why, when)


def _calls(*targets: object) -> Callable[[LoweredProgram], bool]:
    """Condition of a pass: some stage calls one of the operators `targets`."""
    return lambda lowered: any(node.target in targets for stage in lowered.stages.values() for node in stage.graph.nodes)


def _has_stages(lowered: LoweredProgram) -> bool:
    """Whether there is a pipeline to cut, or an option about pipelines for which the pass notes that it has no effect."""
    request = lowered.request
    given = request.options.pipeline
    return request.mesh.pipeline_axis is not None or any((given.schedule, given.splits, given.stages_per_rank))


CAPTURE: Final[Pass[CompilationPhase, TracedModel]] = _pass("capture", "trace.capture_model:capture")

OPERATORS: Final[tuple[Pass[TracedModel, TracedModel], ...]] = (
    _pass("autocast", "trace.lower_autocast:lower_autocast", "before raise: custom operators ignore autocast"),
    _pass("inline", "trace.inline_checkpoints:inline_checkpoints", "before raise, which looks at every call"),
    _pass("raise", "trace.raise_ops:raise_ops", "before AOTAutograd: one node forward and one backward for each composite"),
    _pass(
        "round_between_stages", "trace.round_between_stages:round_between_stages",
        "while calls are the model's, so that backward follows; behind raise, whose calls it stands between",
        when=lambda outset: bool(outset.plan.stage_compressions),
    ),
    _pass("differentiate", "trace.differentiate:differentiate"),
)
FOLD: Final[tuple[Pass[TracedModel, TracedModel], ...]] = (
    _pass("fold_masks", "trace.fold_masks:fold_masks", "once values are pure; before factorize, so that masks tie no dims together"),
    _pass("fold_scans", "trace.fold_scans:fold_scans", "likewise: it is autograd that flips, and flipped dims are whole"),
)
TRACE: Final = (*OPERATORS, *FOLD)
"""The result does not depend on the optimizer: several programs may be compiled from it."""

BETWEEN_STAGES: Final[Pass[TracedModel, TracedModel]] = _pass(
    "between_stages", "trace.round_between_stages:write_roundings",
    "behind the trace, once sizes are known; before factorize, so that what travels is a value like any other",
    when=lambda traced: bool(traced.plan.stage_compressions),
)
SPARSITY: Final[Pass[TracedModel, TracedModel]] = _pass(
    "sparsity", "trace.set_sparsity:set_sparsity",
    "behind the trace, as precision is; before it, so that what is rounded is what a mask has left",
    when=lambda traced: bool(traced.plan.sparsities),
)
PRECISION: Final[Pass[TracedModel, TracedModel]] = _pass(
    "precision", "trace.set_precision:set_precision",
    "behind the trace, which is the same for all plans; before factorize, so that scales are sharded like any value",
    when=lambda traced: bool(traced.plan.formats),
)
COMPRESS: Final[Pass[TracedModel, TracedModel]] = _pass(
    "compress", "place.compress_gradients:compress_gradients",
    "behind precision, which looks for products as the model has them; before update, which takes what is made of gradients here",
    when=lambda traced: bool(traced.plan.gradient_compressions),
)
UPDATE: Final[Pass[TracedModel, TracedModel]] = _pass(
    "update", "trace.append_update:append_update",
    "on the global view, so that norms and updates shard by the same rules as the model",
)
COMPLETED: Final = (BETWEEN_STAGES, SPARSITY, PRECISION, COMPRESS, UPDATE)
"""Passes from the trace of a model to all that one device would compute."""

FACTORIZE: Final[Pass[TracedModel, PlacedModel]] = _pass("factorize", "place.find_factors:find_factors")

SPLIT_AXES: Final[Pass[PlacedModel, PlacedModel]] = _pass(
    "split_axes", "planner.split_mesh_axes:split_axes",
    "once it is known how many heads there are; before annotate, the first that reads the mesh and the plan",
)

PLACE: Final[tuple[Pass[PlacedModel, PlacedModel], ...]] = (
    _pass("annotate", "place.annotate:annotate", "the first that reads the plan's words"),
    _pass("propagate", "place.assign:assign"),
    _pass("lay_ports", "place.lay_ports:lay_ports", "after propagate: a parameter is stored as its first use wants it"),
)

PARTITION: Final[Pass[PlacedModel, LoweredProgram]] = _pass("partition", "partition.make_main_stage:make_main_stage")

GROW: Final[LoweredPass] = _pass(
    "grow", "depth.grow:grow",
    "after partition, whose time grows with the layers; before what reaches across layers: stages, buckets, liveness",
    when=lambda lowered: lowered.depth is not None,
)
ROWS: Final[LoweredPass] = _pass(
    "send_rows", "lower.dispatch_and_combine:dispatch_and_combine",
    "after grow, on the whole graph; before recompute, since what is sent and kept is less",
    when=_calls(meshc.to_groups.default, meshc.to_places.default, meshc.from_groups.default, meshc.from_places.default),
)
USED_ROWS: Final[LoweredPass] = _pass(
    "used_rows", "lower.compact_expert_rows:compact_expert_rows",
    "after send_rows, which looks for what hands rows out; before recompute, which may recompute rows",
    when=_calls(meshc.group_choices.default),
)
CHUNKS: Final[LoweredPass] = _pass(
    "chunks", "stages.write_chunks:write_chunks",
    "after grow, whose blocks have no chunks; before recompute, which asks what forward leaves to backward",
    when=lambda lowered: lowered.placed.chunked is not None,
)
OFFLOAD_PARAMS: Final[LoweredPass] = _pass(
    "offload_params", "memory.offload_params:offload_params",
    "after grow, while phases still stand together; before recompute, which counts what a rank holds",
    when=lambda lowered: bool(lowered.request.offloaded) or any(line.what == PARAMS for line in lowered.plan.offloads),
)
OFFLOAD_STATE: Final[LoweredPass] = _pass(
    "offload_state", "memory.offload_state:offload_state",
    "on the whole update, before stages cut it; before recompute, which counts what a rank holds",
    when=lambda lowered: lowered.request.optimizer is not None and any(line.what == STATE for line in lowered.plan.offloads),
)
RECOMPUTE: Final[LoweredPass] = _pass(
    "recompute", "memory.recompute:recompute",
    "once local bytes and collectives are known; before microbatch and stages, which save what is still read",
    when=lambda lowered: lowered.request.grad,
)
OFFLOAD: Final[LoweredPass] = _pass(
    "offload", "memory.offload:offload",
    "once it is settled what backward reads; before microbatch and stages",
    when=lambda lowered: lowered.request.grad and any(line.what not in STORED for line in lowered.plan.offloads),
)
MICROBATCH: Final[LoweredPass] = _pass(
    "microbatch", "stages.split_microbatches:split_microbatches", "after partition: a microbatch is one more axis there"
)
GROWN: Final = (GROW, ROWS, USED_ROWS, CHUNKS, OFFLOAD_PARAMS, OFFLOAD_STATE)
RECOMPUTED: Final = (*GROWN, RECOMPUTE)
PARTS: Final = (OFFLOAD, MICROBATCH)
"""Passes between partition and stages: `GROWN` before recompute, `RECOMPUTED` up to and including it, `PARTS` after it."""
STAGES: Final[LoweredPass] = _pass(
    "stages", "stages.cut_stages:cut_stages",
    "likewise: a stage hands on what lies on its rank; after microbatch, whose parts it cuts",
    when=_has_stages,
)
"""`passes/driver/pipeline_search.py` runs the passes from annotate to this one for candidate pipelines."""
CUT: Final[LoweredPass] = _pass(
    "cut", "stages.cut_backward:cut_backward",
    "likewise: what lies where decides what is saved",
    when=lambda lowered: lowered.request.grad and not lowered.request.train,
)

LOWER: Final[tuple[LoweredPass, ...]] = (
    _pass(
        "divide_updates", "lower.divide_updates:divide_updates",
        "once it is settled which rank updates what; before collectives, of which it makes others",
    ),
    _pass("collectives", "lower.schedule_collectives:schedule_collectives", "once it is settled which stage a collective is in"),
    _pass(
        "exchanges", "lower.overlap_exchanges:overlap_exchanges",
        "after what travels together is joined; before fuse_updates, which goes by where gradients are",
    ),
    _pass("fuse_updates", "lower.fuse_updates:fuse_updates"),
    _pass(
        "fetch", "lower.prefetch_offloaded:prefetch_offloaded",
        "once updates are one for many; before regions, which end where a copy starts",
        when=_calls(spmd.to_host, spmd.from_host),
    ),
    _pass(
        "regions", "lower.group_regions:group_regions",
        "what stands in a region is what runs in it",
        when=lambda lowered: lowered.request.backend != "eager",
    ),
    _pass(
        "start", "lower.start_reductions_early:start_reductions_early",
        "after regions, which say in which order the parts of sums are made",
    ),
    _pass("memory", "lower.share_memory:share_memory", "last: nothing reads a value that no line here reads"),
)

NAMES: Final[tuple[str, ...]] = (
    CAPTURE.name, *(each.name for each in (*TRACE, *COMPLETED)),
    FACTORIZE.name, SPLIT_AXES.name, *(each.name for each in PLACE),
    PARTITION.name, *(each.name for each in (*RECOMPUTED, *PARTS, STAGES, CUT, *LOWER)),
)  # fmt: skip
"""Names of all passes, in order."""
