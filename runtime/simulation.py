"""A whole program on simulated ranks: its schedule over global values, and what every rank must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from meshc.errors import DeadlockError, VerifyError
from meshc.program import Port, Program
from meshc.runtime.layouts import put_tiles, take_tile
from meshc.runtime.simulate import Observer, run_stage
from meshc.sharding import Sharding, padded_parts

Values = Mapping[str, torch.Tensor]


def simulate(program: Program, values: Values, *, observe: Observer | None = None, poison: bool = True) -> dict[str, torch.Tensor]:
    """Run the schedule on all ranks of the mesh in this process. `values` holds global input tensors by key; global outputs come back.

    Raises DeadlockError if ranks would hang, VerifyError if ranks that should agree on a result do not.
    """
    mesh, sizes = program.mesh, program.axis_sizes
    ranks: list[dict[str, Any]] = []
    for rank in range(mesh.world_size):
        coordinates = mesh.coordinates(rank)
        env: dict[str, Any] = {f"constant:{name}": tensor for name, tensor in program.constants.items()}
        for port in program.inputs:
            if port.kind != "constant":
                value = values[port.key]
                env[port.key] = take_tile(value, port.sharding, sizes, coordinates).clone() if port.sharding else value.clone()
        ranks.append(env)
    for instruction in program.schedule:
        if instruction.op == "run":
            stage = program.stages[instruction.stage]
            inputs = [[env[key] for key in stage.inputs] for env in ranks]
            results = run_stage(stage, inputs, mesh, sizes, microbatch=instruction.microbatch, observe=observe, poison=poison)
            for env, row in zip(ranks, results, strict=True):
                env.update(zip(stage.outputs, row, strict=True))
        elif instruction.op == "add":
            for env in ranks:
                part = env.pop(instruction.value)
                env[instruction.into] = env[instruction.into] + part if instruction.into in env else part
        else:
            raise DeadlockError(f"unknown instruction {instruction.op}")
    return {port.key: gather(program, port, [env[port.key] for env in ranks]) for port in program.outputs}


def first_microbatch(program: Program) -> Program:
    """The program as if there were no microbatch after the first: where each is a step of its own, what it alone gives to the sums."""
    return replace(program, schedule=tuple(instruction for instruction in program.schedule if instruction.microbatch == 0))


def gather(program: Program, port: Port, tiles: list[torch.Tensor]) -> torch.Tensor:
    """The global value of an output from its tiles; every rank's copy must be the same."""
    if port.sharding is None:
        return tiles[0]
    full = whole(tiles, port.sharding, program)
    for rank, tile in enumerate(tiles):
        coordinates = program.mesh.coordinates(rank)
        mine = take_tile(full, port.sharding, program.axis_sizes, coordinates)
        if padded_parts(port.sharding, program.axis_sizes):
            continue
        if not torch.equal(torch.nan_to_num(mine), torch.nan_to_num(tile)):
            error = (mine.double() - tile.double()).abs().max()
            if not error <= 1e-6 * max(1.0, float(full.double().abs().max())):
                raise VerifyError(f"ranks disagree on {port.key}: rank {rank} differs by {float(error):.3g}")
    return full


def whole(tiles: list[torch.Tensor], sharding: Sharding, program: Program) -> torch.Tensor:
    mesh = program.mesh
    return put_tiles([(mesh.coordinates(rank), tile) for rank, tile in enumerate(tiles)], sharding, program.axis_sizes)
