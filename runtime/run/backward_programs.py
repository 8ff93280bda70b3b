"""Backward programs of a loaded module: one for each set of outputs that received gradients, built at the first use of the set.

Ranks must start from the same outputs, or their collectives would not match. A rank compares the set with the others whenever it differs
from the set of the last backward of this module; a rank whose set is the same goes on silently, which the others see (`agreement.agree`).
So the usual case, the same set at each step, costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from meshc.program.program import Instruction, PlainProgram
from meshc.runtime.agreement.compare import agree
from meshc.runtime.run.executor import Executor, LoadedStage

Make = Callable[[frozenset[str]], PlainProgram]
"""The program whose backward begins at the outputs with these names."""


class BackwardPrograms:
    """`run(received, env, step)` runs the backward stage for gradients of the outputs `received`, and returns its outputs' keys."""

    def __init__(self, program: PlainProgram, executor: Executor, make: Make) -> None:
        self.executor = executor
        self.make = make
        self.programs = {frozenset(port.name for port in program.inputs if port.kind == "tangent"): program}
        """Programs built so far, by set; the first is the module's own program, for all outputs."""
        self._loaded: dict[frozenset[str], LoadedStage] = {key: executor.stages["backward"] for key in self.programs}
        self._last: frozenset[str] | None = None

    def run(
        self, received: frozenset[str], env: dict[str, torch.Tensor], step: int, look: Callable[[Iterable[str]], None]
    ) -> tuple[str, ...]:
        """`env` has the tangents and the saved values; gradients are added to it. All ranks call this with the same set. `look` is called
        with the keys that the stage reads, and may raise.

        Raises StateError, or PeerError, on ranks that differ in the set.
        """
        what = f"run backward from {', '.join(sorted(received)) or 'no output'}"
        with self.executor.failure_guard(step, what):
            self._agree(received)
            if not received:
                return ()  # torch comes here too when what follows has given no gradient to any output
            if received not in self.programs:
                self.programs[received] = self.make(received)
        stage = self.programs[received].stages["backward"]
        if not stage.outputs:
            return ()  # nothing that takes gradients is behind these outputs
        look(stage.inputs)
        with self.executor.failure_guard(step, what):
            if received not in self._loaded:
                self._loaded[received] = self.executor.load(stage)
            with self.executor.record_call(step), self.executor.record_instruction(Instruction("run", "backward")):
                self._loaded[received].perform(env)
        return stage.outputs

    def _agree(self, received: frozenset[str]) -> None:
        board = self.executor.board
        if board is None:
            return
        if received != self._last:
            outputs = {"the outputs that backward starts from": "; ".join(sorted(received)) or "none"}
            agree(board, "run backward", outputs, lambda _: "call backward from the same outputs on every rank, in the same order")
            self._last = received
        board.begin("backward")
