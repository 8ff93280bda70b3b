"""Recompute: backward computes again the values of forward that it reads and that are not kept.

    forward   h = mm(x, w);  a = gelu(h);  y = mm(a, v)             h = mm(x, w);  a = gelu(h);  y = mm(a, v)
    backward  gv = mm(t(a), gy)                            becomes  a_1 = gelu(h);  gv = mm(t(a_1), gy)

A policy (`policies.py`) decides which values may be recomputed, a minimum cut (`kept_values.py`) which are kept. A copy is written before
its first reader in backward and belongs to that phase, so that later passes save only what is still read. Numerics do not change: random
draws are repeated by seed and position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from torch.fx import Node

from meshc.cost.devices import devices_of
from meshc.cost.roofline import seconds
from meshc.ir import calls_of, is_integer, records
from meshc.passes.memory.kept_values import least_kept
from meshc.passes.memory.policies import LITTLE
from meshc.passes.memory.recomputable import Recomputable, recomputable_of_stage, returned_values
from meshc.passes.memory.recompute_within_budget import held_bytes, may_hold, recompute_seconds, recompute_within_budget, with_copies
from meshc.passes.memory.trade import Trade
from meshc.passes.memory.write_copies import write_copies
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.plan_faults import NO_MODULE, NO_VALUE, refuse_faults
from meshc.program.packing import is_view


def recompute(lowered: LoweredProgram) -> LoweredProgram:
    """The program with values recomputed in backward. Raises PlanError for lines of the plan that match nothing in the model."""
    request, plan = lowered.request, lowered.plan
    (stage,) = lowered.stages.values()
    forward = calls_of(stage.graph, "forward")
    kept = _kept_names(lowered, forward)
    fixed = {node for node in forward if records(node)[0].of in kept}
    checkpointed = any(records(node)[0].source.region for node in forward)
    usual = request.options.remat or "none"
    if checkpointed or {usual, *(line.policy for line in plan.remats)} != {"none"}:
        can = recomputable_of_stage(lowered, usual, plan.remats, fixed)
        least = least_kept(can.forward, can.operands, can.bytes_of, can.wanted)
        write_copies(stage.graph, can.backward, [node for node in can.forward if node not in least and node in can.operands])
    budget = may_hold(request)
    if request.options.remat is not None or (budget is not None and lowered.mesh.pipeline_axis is not None):
        return lowered
    settled = settled_values(lowered)
    return recompute_by_price(lowered, settled) if budget is None else recompute_within_budget(lowered, budget - request.spare, settled)


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
    faults = [f"{line.where}: {NO_MODULE}" for line in lowered.plan.remats if not any(map(line.covers, modules))]
    found = [(line, returned_values(lowered, line.names)) for line in lowered.plan.kept]
    faults += [f"{line.where}: {NO_VALUE}" for line, values in found if not values]
    refuse_faults("the plan does not fit this model", faults)
    return set().union(*(values for _, values in found))


WORTH: Final = 0.1
"""Share of the seconds of forward and backward that a share of a rank's bytes is worth: 1 % of the bytes, 0.1 % of the seconds.
Of Llama under FSDP 29 % of the memory go for 2.1 % of the seconds, where all that is cheap takes 2.8 % (docs/decisions/recompute.md)."""
LEAST: Final = 0.01
"""Share of a rank's bytes below which a saving is not worth the lines of a program. (An MLP under FSDP saves 0.7 %, and keeps all.)"""


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
    byte_s = price = WORTH * step_s / held
    trade = Trade(can, recompute_seconds(can, lowered, device, each_s))
    while trade.keep_all.bytes - (kept := trade.cheapest_at(price, even=True)).bytes >= LEAST * held:
        # forward and backward as separate stages: one should pass as little as possible to the other
        apart = lowered.mesh.pipeline_axis is not None or not lowered.request.train
        again = kept.again if apart else _without_light_values(kept.again, can)
        left = with_copies(lowered, [(can.backward, again)])
        if lowered.mesh.pipeline_axis is not None:
            return left
        less = held - held_bytes(left)
        if less < LEAST * held:
            break
        if less * byte_s >= kept.seconds:
            return left
        price /= 2  # the peak drops by too little for its seconds: only what saves more bytes per second is recomputed
    return lowered


def _without_light_values(again: Iterable[Node], can: Recomputable) -> list[Node]:
    """`again` without integers and views of values that are kept, which are read as they are."""
    found: dict[Node, None] = {}
    for node in again:
        light = node not in can.learned and (is_view(node) or is_integer(node))
        if not light or any(operand in found for operand in node.all_input_nodes):
            found[node] = None
    return list(found)
