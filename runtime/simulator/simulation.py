"""Simulation of a program on all ranks, or of a graph on one: global outputs of global inputs; an error where copies of a tile differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Interpreter, Node

from meshc.errors import DeadlockError, VerifyError
from meshc.ir.keys import key_of
from meshc.ir.layouts import put_tiles, take_tile
from meshc.ir.sharding import Sharding, padded_parts
from meshc.pipelining.pipeline_stages import slot
from meshc.pipelining.schedule import Action, Recv, Schedule, Send
from meshc.program.accumulate import ACCUMULATES
from meshc.program.program import RUNS, Instruction, PlainProgram, Port
from meshc.program.rank_instructions import steps_of
from meshc.runtime.simulator.reference_products import STAND_INS, DecodedProducts
from meshc.runtime.simulator.simulate import Letter, LetterWait, Observer, RankProgram, lock_step, rank_program, run_stage

Values = Mapping[str, torch.Tensor]
Rows = dict[str, dict[int, torch.Tensor]]
"""Key of an output -> its rows from each microbatch so far."""


def simulate(program: PlainProgram, values: Values, *, observe: Observer | None = None, poison: bool = True) -> dict[str, torch.Tensor]:
    """Run the schedule on all ranks of the mesh in this process. `values` holds global input tensors by key; global outputs come back.

    Raises DeadlockError if ranks would hang, VerifyError if ranks that should agree on a result do not.
    """
    mesh, sizes = program.mesh, program.axis_sizes
    ranks: list[dict[str, torch.Tensor]] = []
    for rank in range(mesh.world_size):
        coordinates = mesh.coordinates(rank)
        env: dict[str, torch.Tensor] = {key_of("constant", name): tensor for name, tensor in program.constants.items()}
        for port in program.inputs:
            if port.kind != "constant":
                value = values[port.key]
                env[port.key] = take_tile(value, port.sharding, sizes, coordinates) if port.sharding else value.clone()
        ranks.append(env)
    if program.pipeline is not None:
        lock_step([_run_rank(program, rank, env, poison) for rank, env in enumerate(ranks)], mesh)
        return {port.key: gather(program, port, ranks) for port in program.outputs}
    rows: list[Rows] = [{} for _ in ranks]
    for instruction in program.schedule:
        if instruction.op in RUNS:
            stage = program.stages[instruction.stage]
            inputs = [[env[key] for key in stage.inputs] for env in ranks]
            results = run_stage(stage, inputs, mesh, sizes, microbatch=instruction.microbatch, observe=observe, poison=poison)
            for env, row in zip(ranks, results, strict=True):
                env.update(zip(stage.outputs, row, strict=True))
        elif instruction.op in ("join", *ACCUMULATES):
            for env, mine in zip(ranks, rows, strict=True):
                _collect(program, instruction, env, mine)
        else:
            raise DeadlockError(f"unknown instruction {instruction.op}")
    return {port.key: gather(program, port, ranks) for port in program.outputs}


def _run_rank(program: PlainProgram, rank: int, env: dict[str, torch.Tensor], poison: bool) -> RankProgram[None]:
    """Runs one rank's whole list of instructions. `env` loses the parameters of other owners."""
    assert program.pipeline is not None
    coordinates = program.mesh.coordinates(rank)
    axis = program.pipeline.axis
    for key, owner in program.pipeline.owners.items():
        if owner != coordinates[axis]:
            env.pop(key, None)
    coming: dict[str, LetterWait] = {}
    rows: Rows = {}
    for step in steps_of(program, coordinates):
        slots = tuple(slot(key, step.microbatch) for key in step.keys)
        peer = program.mesh.rank({**coordinates, axis: step.peer})
        name = ", ".join(slots)
        if step.op == "recv":
            coming |= dict.fromkeys(slots, LetterWait(rank, peer, name))
            continue
        stage = program.stages.get(step.stage)
        read = [slot(key, step.microbatch) for key in step.reads(program.stages)]
        if step.op in ("join", *ACCUMULATES):
            _collect(program, step, env, rows)
        while late := [key for key in read if key in coming]:
            message = next(wait for wait in coming.values() if wait.sender == coming[late[0]].sender)  # the sender's first
            received = yield from _receive(message)
            coming = {key: wait for key, wait in coming.items() if key not in received}
            env.update(received)
        if step.op == "send":
            yield Letter(rank, peer, name, tuple(env[key] for key in slots))
        elif step.op in RUNS and stage is not None:
            where = {**coordinates, "mb": step.microbatch}
            results = yield from rank_program(stage, [env[key] for key in read], where, program.axis_sizes, None, poison)
            env.update({slot(key, step.microbatch): value for key, value in zip(stage.outputs, results, strict=True)})
    for message in dict.fromkeys(coming.values()):
        env.update((yield from _receive(message)))


def _receive(message: LetterWait) -> RankProgram[dict[str, torch.Tensor]]:
    """Waits for a letter; returns its values by key."""
    values = yield message
    assert isinstance(values, tuple)
    return dict(zip(message.name.split(", "), values, strict=True))


def _collect(program: PlainProgram, step: Instruction, env: dict[str, torch.Tensor], rows: Rows) -> None:
    """Adds a microbatch's result to its total: a term of a sum, or rows of an output."""
    part = env.pop(step.value)
    if step.op in ACCUMULATES:
        env[step.into] = ACCUMULATES[step.op](env[step.into], part) if step.into in env else part
        return
    given = rows.setdefault(step.into, {})
    given[step.microbatch] = part
    if len(given) == program.microbatches:
        env[step.into] = torch.cat([given[k] for k in range(len(given))])


def first_microbatch(program: PlainProgram) -> PlainProgram:
    """The program with its first microbatch only, for steps that are the mean of their microbatches."""
    schedule = tuple(replace(one, microbatch=0) for one in program.schedule if one.microbatch == 0 or one.op == "start")
    if program.pipeline is None:
        return replace(program, schedule=schedule)
    lists = program.pipeline.schedule.lists
    first = Schedule(tuple(tuple(item for item in items if _microbatch(item) == 0) for items in lists))
    starts = tuple(replace(start, during=replace(start.during, microbatch=0)) for start in program.pipeline.starts)
    return replace(program, pipeline=replace(program.pipeline, schedule=first, starts=starts))


def _microbatch(item: Action | Send | Recv) -> int:
    return item.microbatch if isinstance(item, Action) else item.message.of.microbatch


def gather(program: PlainProgram, port: Port, ranks: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """The global value of an output from the tiles of its ranks. Raises VerifyError if two ranks' copies of a tile differ."""
    tiles = {rank: env[port.key] for rank, env in enumerate(ranks) if program.owns(port.key, program.mesh.coordinates(rank))}
    if port.sharding is None:
        return next(iter(tiles.values()))
    axes, padded = port.sharding.split_axes(), padded_parts(port.sharding, program.axis_sizes)
    firsts: dict[tuple[int, ...], tuple[Mapping[str, int], torch.Tensor]] = {}
    for rank, tile in tiles.items():
        coordinates = program.mesh.coordinates(rank)
        _, first = firsts.setdefault(tuple(coordinates[axis] for axis in axes), (coordinates, tile))
        if tile is not first and not padded:
            _check_agreement(port, rank, tile, first, tiles.values())
    return put_tiles(firsts.values(), port.sharding, program.axis_sizes)


def _check_agreement(port: Port, rank: int, tile: torch.Tensor, first: torch.Tensor, tiles: Iterable[torch.Tensor]) -> None:
    """Raises VerifyError if two ranks' copies of one tile differ by more than 1e-6 of the largest entry of all tiles."""
    if torch.equal(tile, first) or torch.equal(torch.nan_to_num(tile), torch.nan_to_num(first)):
        return
    wide = torch.complex128 if first.is_complex() else torch.float64
    error = (first.to(wide) - tile.to(wide)).abs().max()
    if not error <= 1e-6 * max(1.0, *(float(one.to(wide).abs().max()) for one in tiles)):
        raise VerifyError(f"ranks disagree on {port.key}: rank {rank} differs by {float(error):.3g}")


def whole(tiles: list[torch.Tensor], sharding: Sharding, program: PlainProgram) -> torch.Tensor:
    mesh = program.mesh
    return put_tiles([(mesh.coordinates(rank), tile) for rank, tile in enumerate(tiles)], sharding, program.axis_sizes)


def node_values(graph: Graph, inputs: Iterable[torch.Tensor]) -> dict[Node, Any]:
    """Runs a global-view graph on one device; returns the value of each node."""
    interpreter = Interpreter(nn.Module(), garbage_collect_values=False, graph=graph)
    interpreter.extra_traceback = False
    with DecodedProducts() if any(node.target in STAND_INS for node in graph.nodes) else nullcontext():
        interpreter.run(*inputs, enable_io_processing=False)
    return interpreter.env
