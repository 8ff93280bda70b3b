"""Recompute: backward computes again the values of forward that it reads and that are not kept.

    forward   h = mm(x, w);  a = gelu(h);  y = mm(a, v)             h = mm(x, w);  a = gelu(h);  y = mm(a, v)
    backward  gv = mm(t(a), gy)                            becomes  a_1 = gelu(h);  gv = mm(t(a_1), gy)

A policy (`policies.py`) decides which values may be recomputed, a minimum cut (`kept_values.py`) which are kept. A copy is written before
its first reader in backward and belongs to that phase, so that later passes save only what is still read. Numerics do not change: random
draws are repeated by seed and position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Final

from torch.fx import Graph, Node

from meshc.cost.devices import devices_of
from meshc.cost.roofline import seconds
from meshc.ir import calls_of, has_record, is_getitem, is_integer, records, value_of
from meshc.passes.memory.kept_values import least_kept
from meshc.passes.memory.policies import LITTLE
from meshc.passes.memory.recomputable import Recomputable, recomputable_of_stage
from meshc.passes.memory.recompute_within_budget import held_bytes, may_hold, recompute_seconds, recompute_within_budget, with_copies
from meshc.passes.memory.trade import Trade
from meshc.passes.memory.write_copies import write_copies
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.plan_faults import refuse_faults
from meshc.program.packing import is_view

_NAMED = "name modules as model.named_modules() does, with * for any text, or leave the line out"
_NO_MODULE = f"forward runs no operator in such a module; {_NAMED}"


def recompute(lowered: LoweredProgram) -> LoweredProgram:
    """The program with values recomputed in backward. Raises PlanError for lines of the plan that match nothing in the model."""
    request, plan = lowered.request, lowered.plan
    (stage,) = lowered.stages.values()
    forward = calls_of(stage.graph, "forward")
    kept = _kept_names(lowered, forward)
    fixed = {node for node in forward if records(node)[0].of in kept}
    checkpointed = any(records(node)[0].source.region for node in forward)
    if checkpointed or {request.options.remat or "none", *(line.policy for line in plan.remats)} != {"none"}:
        recompute_all_but_least(recomputable_of_stage(lowered, request.options.remat or "none", plan.remats, fixed), stage.graph)
    budget = may_hold(request)
    if request.options.remat is not None:
        return lowered
    if budget is None:
        return recompute_by_price(lowered, settled_values(lowered))
    return (
        recompute_within_budget(lowered, budget - request.spare, settled_values(lowered)) if lowered.mesh.pipeline_axis is None else lowered
    )


def settled_values(lowered: LoweredProgram) -> set[Node]:
    """Values of forward for which the plan, or a checkpointed region of the model, says whether they are recomputed, whatever the
    budget."""
    (stage,) = lowered.stages.values()
    forward, plan = calls_of(stage.graph, "forward"), lowered.plan
    kept = _kept_names(lowered, forward)
    return {
        node for node in forward
        if (one := records(node)[0]).of in kept or one.source.region or any(line.covers(one.source.module) for line in plan.remats)
    }  # fmt: skip


def _kept_names(lowered: LoweredProgram, forward: list[Node]) -> set[str]:
    """Names, as in records, of the values that the plan's lines keep. Raises PlanError."""
    modules = {records(node)[0].source.module for node in forward}
    faults = [f"{line.where}: {_NO_MODULE}" for line in lowered.plan.remats if not any(map(line.covers, modules))]
    kept = set()
    for line in lowered.plan.kept:
        found = {
            f"{value.name}.{index}"
            for node in lowered.joint.graph.nodes
            for index, one in enumerate(records(node) if has_record(node) else ())
            for value, index in [value_of(node) if is_getitem(node) else (node, index)]
            if any(fnmatchcase(path, line.pattern) for path in one.returned_by)
        }
        if not found:
            faults.append(f"{line.where}: no module of this name returns a value; {_NAMED}")
        kept |= found
    refuse_faults("the plan does not fit this model", faults)
    return kept


def recompute_all_but_least(can: Recomputable, graph: Graph) -> None:
    """In place: keeps the fewest bytes, and recomputes the other values."""
    kept = least_kept(can.forward, can.operands, can.bytes_of, can.wanted)
    write_copies(graph, can.backward, [node for node in can.forward if node not in kept and node in can.operands])


WORTH: Final = 0.1
"""Share of the seconds of forward and backward that a share of a rank's bytes is worth: 1 % of the bytes, 0.1 % of the seconds."""
SHARES: Final = (1.0, 0.5, 0.25)
"""Parts of that price of a byte: if a rank's peak drops by too little, only what saves more bytes per second is recomputed."""
LEAST: Final = 0.01
"""Share of a rank's bytes below which a saving is not worth the lines of a program."""


def recompute_by_price(lowered: LoweredProgram, fixed: Collection[Node]) -> LoweredProgram:
    """The program without a memory budget: values are recomputed where the bytes are worth the seconds. `fixed`: not recomputed.

        llama, fsdp      29.3 % less held for 2.1 % of the step's seconds     recomputed
        mlp, fsdp         0.7 % less for 0.3 %                                kept

    A minimum cut (`trade.py`) at the price of a byte (`WORTH`) decides which values of the policy `cheap` are recomputed, and is taken if
    the rank's peak drops by as much: values that are not live at the peak save nothing. The peak of a pipeline is unknown before it is
    cut. All-to-alls may be recomputed too: otherwise the output of Ulysses' attention would be kept twice, by heads for attention and by
    positions for the projection.
    """
    can = recomputable_of_stage(lowered, LITTLE, fixed=fixed)
    if not can.wanted or not can.operands:
        return lowered
    device = devices_of(lowered.mesh).slowest()
    each_s = {node: seconds(node, device) for node in (*can.forward, *can.backward)}
    held, step_s = held_bytes(lowered), sum(each_s.values())
    byte_s = WORTH * step_s / held
    trade = Trade(can, recompute_seconds(can, lowered, device, each_s))
    for share in SHARES:
        kept = trade.worth(share * byte_s)
        if trade.keep_all.bytes - kept.bytes < LEAST * held:
            break
        again = kept.again if _has_separate_stages(lowered) else _without_light_values(kept.again, can)
        left = with_copies(lowered, [(can.backward, again)])
        if lowered.mesh.pipeline_axis is not None:
            return left
        less = held - held_bytes(left)
        if less >= LEAST * held and less * byte_s >= kept.seconds:
            return left
    return lowered


def _has_separate_stages(lowered: LoweredProgram) -> bool:
    """Whether forward and backward will be separate stages, of which one should pass as little as possible to the other."""
    return lowered.mesh.pipeline_axis is not None or not lowered.request.train


def _without_light_values(again: Iterable[Node], can: Recomputable) -> list[Node]:
    """`again` without integers and views of values that are kept, which are read as they are."""
    found: dict[Node, None] = {}
    for node in again:
        light = node not in can.learned and (is_view(node) or is_integer(node))
        if not light or any(operand in found for operand in node.all_input_nodes):
            found[node] = None
    return list(found)
