"""`program.rebalance`: experts with high measured load are moved between ranks, between two calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING

import torch

from meshc.errors import InputError, PlanError, StateError, join_names
from meshc.frontend.expert_load import ExpertLoad
from meshc.ir.mesh import axis_sizes
from meshc.plan.expert_group_counts import groups_of
from meshc.report.rebalance_report import RebalanceReport
from meshc.runtime.agreement.compare import digest_number, first_other
from meshc.runtime.comm.collectives import numbers_of_ranks
from meshc.runtime.state import moved_experts
from meshc.runtime.state.store import Store

if TYPE_CHECKING:
    from meshc.api.handle import Program

Loads = Mapping[str, "torch.Tensor | Sequence[float] | ExpertLoad"]


def rebalance(program: Program, loads: Loads | None, least: float, copies: int | None) -> RebalanceReport:
    """`Program.rebalance`, on every rank."""
    if not 0 <= least < 1:
        raise InputError(f"rebalance(least={least!r}): a share from 0 to 1, such as 0.05")
    spare = _spare(program, copies)
    store = program.store
    movable = moved_experts.experts_of(store.model)
    if program.options.experts.placement is None or not movable:
        raise StateError(
            "the experts of this program stay where they are\n  what to do: compile with "
            'options=meshc.Options(experts=meshc.Experts(placement="movable")), from the first program of the model on'
        )
    found = _loads(store, movable, _measured_loads(program) if loads is None else loads, given=loads is not None)
    _refuse_differing(store, repr((least, spare, sorted(found.items()))))
    groups = {path: groups_of(program.plan, axis_sizes(program.mesh), path) for path in found}
    if all(count == 1 for count in groups.values()):
        raise PlanError(
            f"no axis of the mesh {program.mesh} splits these experts, so every rank has them all\n"
            "  what to do: an axis called ep, or `AXIS: experts > batch` in the plan"
        )
    store.refuse_unfilled()
    store.refuse_changed_model()
    store.adopt_changes()
    layers = [moved_experts.layer_of(store, path, groups[path], spare) for path in found]
    return moved_experts.rebalance(layers, found, least, partial(moved_experts.move, store))


def _spare(program: Program, copies: int | None) -> int:
    """Number of slots for copies of experts that a rank may use. Raises InputError."""
    there = program.options.experts.copies
    if copies is None or 0 <= copies <= there:
        return there if copies is None else copies
    raise InputError(
        f"rebalance(copies={copies!r}): each rank has {there} places for copies of experts of a layer\n"
        f"  what to do: a number from 0 to {there}, or "
        f'options=meshc.Options(experts=meshc.Experts(placement="movable", copies={copies!r})) from the first program of the model on'
    )


def _measured_loads(program: Program) -> Mapping[str, ExpertLoad]:
    experts = program.metrics.get("experts")
    if not isinstance(experts, Mapping):
        raise StateError(
            "no load of experts has been measured: that is what a step tells (program.metrics)\n"
            '  what to do: call the program first, or rebalance(loads={"model.layers.0.mlp.experts": tokens of each expert})'
        )
    return experts


def _loads(store: Store, movable: Sequence[str], loads: Loads, given: bool) -> dict[str, list[float]]:
    """Loads by layer, in the model's order. Raises InputError if they do not fit the model."""
    strange = [path for path in loads if path not in movable] if given else []
    if strange:
        raise InputError(f"rebalance: {join_names(strange, 3)} are no experts that can be moved; those are {join_names(list(movable), 4)}")
    found: dict[str, list[float]] = {}
    for path in (path for path in movable if path in loads):
        said = loads[path]
        values = said.tokens if isinstance(said, ExpertLoad) else said
        found[path] = [float(load) for load in (values.tolist() if isinstance(values, torch.Tensor) else values)]
        count = len(moved_experts.layer_of(store, path, 1).spread.slots)
        if len(found[path]) != count or not all(isfinite(load) and load >= 0 for load in found[path]):
            raise InputError(f"rebalance: the load of {path} is one number for each of its {count} experts, 0 or more: {found[path]}")
    if not found:
        raise InputError(f"rebalance: loads of no layer; experts that can be moved are those of {join_names(list(movable), 4)}")
    return found


def _refuse_differing(store: Store, said: str) -> None:
    """Raises InputError on all ranks if ranks passed different arguments."""
    other = first_other(numbers_of_ranks([digest_number([said.encode()])], store.device, store.transfers.groups.world))
    if other is not None:
        raise InputError(
            f"rebalance: ranks 0 and {other} were given different loads, and experts lie where all ranks know them\n"
            "  what to do: the same loads on every rank, such as sums over all; program.metrics has those of the whole batch"
        ).mark_everywhere()
