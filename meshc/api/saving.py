"""`program.save`: the artifact of a compiled program, with weights and initial state, so that it starts without the model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from meshc import artifact
from meshc.errors import StateError
from meshc.frontend.expert_placement import initial_slots, is_slot_table
from meshc.ir.keys import name_of
from meshc.optimizer.optimizer import numbers
from meshc.optimizer.spec import AS_IT_IS
from meshc.options import NAMES, Experts
from meshc.program.program import Info

if TYPE_CHECKING:
    from meshc.api.handle import Program

DEFAULT: Final = {name: getattr(Experts(), field) for name, (group, field) in NAMES.items() if group == "experts"}
"""Options of experts where nothing is said, by name."""


def save(program: Program, path: str | os.PathLike[str], weights: bool) -> None:
    """Write the folder of a program; with a process group every rank calls it, weights are gathered and rank 0 writes, while the others
    wait; what it refuses, all raise."""
    if program.step is not None and program.step.scaling is not None:
        raise StateError(
            "a saved program has no scaler: `meshc run` would scale the loss by one number for good\n"
            "  what to do: save a step without scaler=, in float32 or under autocast to bfloat16; state is saved by program.state_dict()"
        )
    store = program.compilations.store if dist.is_initialized() else None
    tensors: dict[str, torch.Tensor] | None = None
    if weights:
        tensors = _local_tensors(program) if store is None else store.whole_model()

    def write() -> None:
        found = {**_buffers(program), **tensors} if store is not None and tensors is not None else tensors
        program.general.info.update(beginnings(program))
        artifact.save(program.compilations.last.made.with_traced_graph(program.general), path, found)

    if store is None:
        write()
    else:
        program.world.from_rank_0(write)


def _local_tensors(program: Program) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model that is whole in this process, if they have values."""
    found = {name: value for name, value in program.asked.module.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: value.detach() for name, value in {**_buffers(program), **found}.items() if not value.is_meta}


def _buffers(program: Program) -> dict[str, torch.Tensor]:
    """All buffers, those that state dicts leave out (rotary tables) too. Experts are saved where their numbers say."""
    found = program.asked.module.named_buffers(remove_duplicate=False)
    return {name: initial_slots(buffer) if is_slot_table(name) else buffer for name, buffer in found if not buffer.is_meta}


def beginnings(program: Program) -> Info:
    """What a saved program begins with: seed, numbers of the optimizer and of Python, and what each fresh state is filled with.

    A fill of None is a copy of the parameter. State that the optimizer holds already is not saved.
    """
    seed = torch.initial_seed() if program.options.seed is None else program.options.seed
    store = program.compilations.store
    found: Info = {"seed": seed if store is None else store.seed}
    experts: Any = {name: value for name, value in program.options.by_name().items() if value != DEFAULT.get(name, value)}
    if experts:
        found["experts"] = experts
    spec = program.compilations.spec
    reads = program.compilations.last.reads
    own, branches = reads.numbers(), [(-1, each.number, each.relation, each.constant) for one in reads.inputs for each in one.guards]
    if own:
        found["numbers"], found["guards"] = own, branches
    if program.step is None or spec is None:
        return found
    rows = enumerate(numbers(program.step.optimizers))
    found["numbers"] = {**own, **{f"{index}.{name}": value for index, row in rows for name, value in row.items()}}
    of_groups = [(group.index, guard.number, guard.relation, guard.constant) for group in spec.groups for guard in group.guards]
    found["guards"] = [*branches, *of_groups]
    training = program.options.training
    if training != AS_IT_IS:
        found["optimizer_state"], found["master_weights"] = training.optimizer_state, training.master_weights
    if training.keep_gradients or training.accumulate:
        found["keep_gradients"], found["accumulate"] = training.keep_gradients, training.accumulate
    fresh: dict[str, float | None] = {}
    found["fresh"] = fresh
    names = {id(parameter): name for name, parameter in program.asked.module.named_parameters()}
    for group in spec.groups:
        for parameter, slots in zip(group.params, group.slots, strict=True):
            name = names.get(id(parameter))
            if name is None and store is not None:  # described before its replacement
                name = name_of(store.parameter_key(parameter) or "")
            fresh.update({f"{name}/{slot.name}": slot.fill for slot in slots})
    return found
