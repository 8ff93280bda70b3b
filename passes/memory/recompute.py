"""Recompute: backward computes again the values of forward that it reads and a policy does not keep.

    forward   h = mm(x, w);  a = gelu(h);  y = mm(a, v)             h = mm(x, w);  a = gelu(h);  y = mm(a, v)
    backward  gv = mm(t(a), gy)                            becomes  a_1 = gelu(h);  gv = mm(t(a_1), gy)

A policy (`policies.py`) says what may be recomputed, a minimum cut (`kept_values.py`) what is kept for it. A copy stands before its first
reader in backward and belongs to that phase, so that all passes after this one save what is still read, and no more. Nothing about the
numbers changes: random draws go by their number.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch.fx import Graph, Node

from meshc.ir import calls_of, has_record, is_getitem, records, value_of
from meshc.passes.memory.kept_values import least_kept
from meshc.passes.memory.recomputable import Recomputable, recomputable_of_stage
from meshc.passes.memory.recompute_by_price import recompute_by_price
from meshc.passes.memory.recompute_within_budget import may_hold, recompute_within_budget
from meshc.passes.memory.write_copies import write_copies
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.faults import refuse_faults

_NAMED = "name modules as model.named_modules() does, with * for any text, or leave the line out"
_NO_MODULE = f"forward runs no operator in such a module; {_NAMED}"


def recompute(lowered: LoweredProgram) -> LoweredProgram:
    """Of programs with a backward. Raises PlanError for lines of the plan about nothing that the model has."""
    request, plan = lowered.request, lowered.plan
    (stage,) = lowered.stages.values()
    forward = calls_of(stage.graph, "forward")
    kept = _kept_names(lowered, forward)
    fixed = {node for node in forward if records(node)[0].of in kept}
    checkpointed = any(records(node)[0].source.region for node in forward)
    if checkpointed or {request.remat or "none", *(line.policy for line in plan.remats)} != {"none"}:
        recompute_all_but_least(recomputable_of_stage(lowered, request.remat or "none", plan.remats, fixed), stage.graph)
    budget = may_hold(request)
    if request.remat is not None:
        return lowered
    if budget is None:
        return recompute_by_price(lowered, settled_values(lowered))
    return (
        recompute_within_budget(lowered, budget - request.spare, settled_values(lowered)) if lowered.mesh.pipeline_axis is None else lowered
    )


def settled_values(lowered: LoweredProgram) -> set[Node]:
    """Values of forward of which the plan, or a checkpointed region of the model, says whether they are recomputed: a budget changes
    nothing about them."""
    (stage,) = lowered.stages.values()
    forward, plan = calls_of(stage.graph, "forward"), lowered.plan
    kept = _kept_names(lowered, forward)
    return {
        node for node in forward
        if (one := records(node)[0]).of in kept or one.source.region or any(line.covers(one.source.module) for line in plan.remats)
    }  # fmt: skip


def _kept_names(lowered: LoweredProgram, forward: list[Node]) -> set[str]:
    """What lines of the plan keep, as records name it. Raises PlanError."""
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
    """The fewest bytes are kept."""
    kept = least_kept(can.forward, can.operands, can.bytes_of, can.wanted)
    write_copies(graph, can.backward, [node for node in can.forward if node not in kept and node in can.operands])
