"""Pass pipeline: every pass in order, with the reason where its place is not obvious.

    asked  ── capture ──>  traced  ── factorize ──>  placed  ── partition ──>  lowered  ──>  a program

`passes/driver/compile_program.py` runs them.
"""

from __future__ import annotations

from typing import Final

from meshc.passes.depth.grow import grow
from meshc.passes.lower.compact_expert_rows import compact_expert_rows
from meshc.passes.lower.dispatch_and_combine import dispatch_and_combine
from meshc.passes.lower.divide_updates import divide_updates
from meshc.passes.lower.fuse_updates import fuse_updates
from meshc.passes.lower.group_regions import group_regions
from meshc.passes.lower.overlap_exchanges import overlap_exchanges
from meshc.passes.lower.prefetch_offloaded import prefetch_offloaded
from meshc.passes.lower.schedule_collectives import schedule_collectives
from meshc.passes.lower.share_memory import share_memory
from meshc.passes.lower.start_reductions_early import start_reductions_early
from meshc.passes.memory.offload import offload
from meshc.passes.memory.offload_params import offload_params
from meshc.passes.memory.offload_state import offload_state
from meshc.passes.memory.recompute import recompute
from meshc.passes.partition.make_main_stage import make_main_stage
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Pass
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.place.annotate import annotate
from meshc.passes.place.assign import assign
from meshc.passes.place.find_factors import find_factors
from meshc.passes.place.lay_ports import lay_ports
from meshc.passes.stages.cut_backward import cut_backward
from meshc.passes.stages.cut_stages import cut_stages
from meshc.passes.stages.split_microbatches import split_microbatches
from meshc.passes.stages.write_chunks import write_chunks
from meshc.passes.trace.append_update import append_update
from meshc.passes.trace.capture_model import capture
from meshc.passes.trace.differentiate import differentiate
from meshc.passes.trace.fold_masks import fold_masks
from meshc.passes.trace.fold_scans import fold_scans
from meshc.passes.trace.inline_checkpoints import inline_checkpoints
from meshc.passes.trace.lower_autocast import lower_autocast
from meshc.passes.trace.raise_ops import raise_ops

CAPTURE: Final[Pass[CompilationPhase, TracedModel]] = Pass("capture", capture)

OPERATORS: Final[tuple[Pass[TracedModel, TracedModel], ...]] = (
    Pass("autocast", lower_autocast, "before raise: custom operators ignore autocast"),
    Pass("inline", inline_checkpoints, "before raise, which looks at every call"),
    Pass("raise", raise_ops, "before AOTAutograd: one node forward and one backward for each composite"),
    Pass("differentiate", differentiate),
)
FOLD: Final[tuple[Pass[TracedModel, TracedModel], ...]] = (
    Pass("fold_masks", fold_masks, "once values are pure; before factorize, so that masks tie no dims together"),
    Pass("fold_scans", fold_scans, "likewise: it is autograd that flips, and flipped dims are whole"),
)
TRACE: Final = (*OPERATORS, *FOLD)
"""What they leave knows nothing of the optimizer: several programs may be made of it."""

UPDATE: Final[Pass[TracedModel, TracedModel]] = Pass(
    "update", append_update, "on the global view, so that norms and updates shard by the same rules as the model"
)

FACTORIZE: Final[Pass[TracedModel, PlacedModel]] = Pass("factorize", find_factors)

PLACE: Final[tuple[Pass[PlacedModel, PlacedModel], ...]] = (
    Pass("annotate", annotate, "the first that reads the plan"),
    Pass("propagate", assign),
    Pass("lay_ports", lay_ports, "after propagate: a parameter is stored as its first use wants it"),
)

PARTITION: Final[Pass[PlacedModel, LoweredProgram]] = Pass("partition", make_main_stage)

GROW: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "grow", grow, "after partition, whose time grows with the layers; before what reaches across layers: stages, buckets, liveness"
)
ROWS: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "send_rows", dispatch_and_combine, "after grow, on the whole graph; before recompute, since what is sent and kept is less"
)
USED_ROWS: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "used_rows", compact_expert_rows, "after send_rows, which looks for what hands rows out; before recompute, which may recompute rows"
)
CHUNKS: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "chunks", write_chunks, "after grow, whose blocks have no chunks; before recompute, which asks what forward leaves to backward"
)
OFFLOAD_PARAMS: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "offload_params", offload_params, "after grow, while phases still stand together; before recompute, which counts what a rank holds"
)
OFFLOAD_STATE: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "offload_state", offload_state, "on the whole update, before stages cut it; before recompute, which counts what a rank holds"
)
RECOMPUTE: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "recompute", recompute, "once local bytes and collectives are known; before microbatch and stages, which save what is still read"
)
OFFLOAD: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "offload", offload, "once it is settled what backward reads; before microbatch and stages"
)
MICROBATCH: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "microbatch", split_microbatches, "after partition: a microbatch is one more axis there"
)
GROWN: Final = (GROW, ROWS, USED_ROWS, CHUNKS, OFFLOAD_PARAMS, OFFLOAD_STATE)
RECOMPUTED: Final = (*GROWN, RECOMPUTE)
PARTS: Final = (OFFLOAD, MICROBATCH)
"""Those of them that come before a pipeline is cut: before and up to what backward recomputes, and behind that."""
STAGES: Final[Pass[LoweredProgram, LoweredProgram]] = Pass(
    "stages", cut_stages, "likewise: a stage hands on what lies on its rank; after microbatch, whose parts it cuts"
)
"""`passes/driver/pipeline_search.py` runs those from the plan on to here for each candidate, where a pipeline leaves a choice."""
CUT: Final[Pass[LoweredProgram, LoweredProgram]] = Pass("cut", cut_backward, "likewise: what lies where decides what is saved")

LOWER: Final[tuple[Pass[LoweredProgram, LoweredProgram], ...]] = (
    Pass("divide_updates", divide_updates, "once it is settled which rank updates what; before collectives, of which it makes others"),
    Pass("collectives", schedule_collectives, "once it is settled which stage a collective is in"),
    Pass("exchanges", overlap_exchanges, "after what travels together is joined; before fuse_updates, which goes by where gradients are"),
    Pass("fuse_updates", fuse_updates),
    Pass("fetch", prefetch_offloaded, "once updates are one for many; before regions, which end where a copy starts"),
    Pass("regions", group_regions, "what stands in a region is what runs in it"),
    Pass("start", start_reductions_early, "after regions, which say in which order the parts of sums are made"),
    Pass("memory", share_memory, "last: nothing reads a value that no line here reads"),
)

NAMES: Final[tuple[str, ...]] = (
    CAPTURE.name, *(each.name for each in (*TRACE, UPDATE)),
    FACTORIZE.name, *(each.name for each in PLACE),
    PARTITION.name, *(each.name for each in (*RECOMPUTED, *PARTS, STAGES, CUT, *LOWER)),
)  # fmt: skip
"""Of all passes, in order."""
