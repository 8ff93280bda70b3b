"""Walks a program's schedule on one rank.

A value is known by a key: a port's (`parameter:w`, `input:x`), or one that a stage made for another (`value:...`, `part:...`, `sum:...`).
Nothing here is special to a program of one stage; a schedule of one instruction is a list like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from meshc import spmd
from meshc.errors import StateError
from meshc.program import Instruction, Program, Stage
from meshc.runtime.codegen import generate
from meshc.runtime.failure import FailureBoard
from meshc.runtime.groups import Groups
from meshc.runtime.regions import compile_regions

RunStage = Callable[..., list[Any]]


@dataclass(frozen=True)
class LoadedStage:
    """A stage on this rank: `perform` reads its inputs from the values by key, and adds its outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: RunStage

    def perform(self, env: dict[str, Any], microbatch: int = 0) -> None:
        results = self.run([env[key] for key in self.inputs], microbatch)
        env.update(zip(self.outputs, results, strict=True))


def needed_groups(program: Program) -> list[tuple[str, ...]]:
    """Axes of every collective of a program, each once, in program order: the same list on all ranks."""
    found: dict[tuple[str, ...], None] = {}
    for stage in program.stages.values():
        for node in stage.graph.nodes:
            if spmd.is_collective(node.target):
                axes = tuple(node.args[1])
                if axes != ("mb",):
                    found[axes] = None
    return list(found)


class Executor:
    """A program loaded on this rank. `run(values, step)` returns the program's outputs by key."""

    def __init__(
        self,
        program: Program,
        groups: Groups,
        coordinates: Mapping[str, int],
        device: torch.device,
        board: FailureBoard | None = None,
        backend: str = "eager",
    ) -> None:
        self.program = program
        self.device = device
        self.board = board
        groups.prepare(needed_groups(program))
        if board is not None:
            known = {id(group) for group in board.groups}
            board.groups += [group for group in groups.all_groups() if id(group) not in known]
        here = self._here if board is not None else None
        make = {"eager": generate, "inductor": compile_regions}.get(backend)
        if make is None:
            raise StateError(f"backend={backend!r} is not known: use 'eager' or 'inductor'")
        self._make: Callable[[Stage], RunStage] = lambda stage: make(stage, groups, coordinates, device, here)
        self.stages: dict[str, LoadedStage] = {name: self.load(stage) for name, stage in program.stages.items()}
        self.constants = {f"constant:{name}": tensor.to(device) for name, tensor in program.constants.items()}

    def load(self, stage: Stage) -> LoadedStage:
        """A stage as this rank runs it. One that is not the program's own uses no other groups than the program does."""
        return LoadedStage(stage.inputs, stage.outputs, self._make(stage))

    def _here(self, instruction: str) -> None:
        assert self.board is not None
        self.board.instruction = instruction

    def run(self, values: dict[str, Any], step: int = 0) -> dict[str, Any]:
        """Run the whole schedule. `values` holds every input port by key; parameters and states are updated in place."""
        env = {**values, **self.constants}
        for instruction in self.program.schedule:
            with self.guarded(step, f"{instruction.op} {instruction.stage} {instruction.microbatch}"):
                self.perform(instruction, env)
        return env

    def guarded(self, step: int, text: str) -> AbstractContextManager[None]:
        """A context in which this rank's failure reaches the others, and theirs this one."""
        return nullcontext() if self.board is None else self.board.guard(step, text)

    def perform(self, instruction: Instruction, env: dict[str, Any]) -> None:
        if instruction.op == "run":
            self.stages[instruction.stage].perform(env, instruction.microbatch)
        elif instruction.op == "add":
            part = env.pop(instruction.value)
            if instruction.into in env:
                env[instruction.into].add_(part)
            else:
                env[instruction.into] = part.clone() if part._is_view() else part
        else:
            raise StateError(f"the schedule has an instruction that this runtime does not know: {instruction.op}")
