"""The compiler's table of contents: every pass, in order, with the reason where its place is not obvious.

    asked  ── capture ──>  traced  ── factorize ──>  placed  ── partition ──>  lowered  ──>  a program

`passes/driver/compile.py` runs them.
"""

from __future__ import annotations

from typing import Final

from meshc.passes.lower import collectives, emit, group_regions
from meshc.passes.microbatches import cut, microbatch
from meshc.passes.partition import main_stage
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.outset import Outset
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.single import Pass
from meshc.passes.phases.traced import Traced
from meshc.passes.place import annotate, assign, find_factors, lay_ports
from meshc.passes.stages import cut_stages
from meshc.passes.trace import append_update, autocast, capture, differentiate, fold_masks, inline, raise_ops

CAPTURE: Final[Pass[Outset, Traced]] = Pass("capture", capture.capture)

TRACE: Final[tuple[Pass[Traced, Traced], ...]] = (
    Pass("autocast", autocast.autocast, "before raise: custom operators ignore autocast"),
    Pass("inline", inline.inline_checkpoints, "before raise, which looks at every call"),
    Pass("raise", raise_ops.raise_ops, "before AOTAutograd: one node forward and one backward for each composite"),
    Pass("differentiate", differentiate.differentiate),
    Pass("fold_masks", fold_masks.fold_masks, "once values are pure; before factorize, so that masks tie no dims together"),
)
"""What they leave knows nothing of the optimizer: several programs may be made of it."""

UPDATE: Final[Pass[Traced, Traced]] = Pass(
    "update", append_update.append_update, "on the global view, so that norms and updates shard by the same rules as the model"
)

FACTORIZE: Final[Pass[Traced, Placed]] = Pass("factorize", find_factors.find_factors)

PLACE: Final[tuple[Pass[Placed, Placed], ...]] = (
    Pass("annotate", annotate.annotate, "the first that reads the plan"),
    Pass("propagate", assign.assign),
    Pass("lay_ports", lay_ports.lay_ports, "after propagate: a parameter is stored as its first use wants it"),
)

PARTITION: Final[Pass[Placed, Lowered]] = Pass("partition", main_stage.make_main_stage)

CUT: Final[tuple[Pass[Lowered, Lowered], ...]] = (
    Pass("microbatch", microbatch.split_microbatches, "after partition: a microbatch is one more axis there"),
    Pass("stages", cut_stages.cut_stages, "likewise: a stage hands on what lies on its rank; after microbatch, whose parts it cuts"),
    Pass("cut", cut.cut_backward, "likewise: what lies where decides what is saved"),
)

LOWER: Final[tuple[Pass[Lowered, Lowered], ...]] = (
    Pass("collectives", collectives.schedule_collectives, "once it is settled which stage a collective is in"),
    Pass("emit", emit.fuse_updates),
    Pass("regions", group_regions.group_regions, "last: what stands in a region is what runs in it"),
)

NAMES: Final[tuple[str, ...]] = (
    CAPTURE.name, *(each.name for each in (*TRACE, UPDATE)),
    FACTORIZE.name, *(each.name for each in PLACE),
    PARTITION.name, *(each.name for each in (*CUT, *LOWER)),
)  # fmt: skip
"""Of all passes, in order."""
