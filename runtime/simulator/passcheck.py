"""Translation validation of each pass: the program after it, on seeded values, against the program before it.

Before lowering to operators the graph of torch's calls is checked (`callcheck.py`). Before `partition` the graph runs on one device; after
it, on simulated ranks; the truth is the result of the first graph with gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph

from meshc.errors import VerifyError
from meshc.frontend.capture import TorchGraph
from meshc.ir import has_record, records
from meshc.ir.graph import output_of
from meshc.ir.keys import kind_of
from meshc.program.microbatch_split import MicrobatchSplit
from meshc.program.program import Instruction, PlainProgram, Port
from meshc.runtime.simulator.callcheck import CallCheck, draw_values
from meshc.runtime.simulator.reference_comparison import LOW
from meshc.runtime.simulator.simulation import first_microbatch, node_values, simulate
from meshc.runtime.simulator.tensor_error import FLOOR, error

TOLERANCE, LOW_TOLERANCE = 1e-4, 3e-2
"""Correct single-precision programs of any depth stay below the first, those in lower precision below the second, since ranks add up
rounded parts; programs broken by a pass do not."""

NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "betas_0": 0.9, "betas_1": 0.999, "eps": 1e-8, "momentum": 0.9}


class PassCheck:
    """One per compilation; called after each pass that has changed the program."""

    def __init__(self) -> None:
        self.tolerance = TOLERANCE
        self.begin_again()

    def begin_again(self) -> None:
        """Forgets all values and truths, for another program."""
        self.values: dict[str, torch.Tensor] = {}
        self.truth: dict[str, torch.Tensor] = {}
        self.calls = CallCheck()

    def check_calls(self, name: str, model: TorchGraph, device: str) -> None:
        """Checks the graph of torch's calls, before lowering to operators."""
        self.calls.check(name, model, device)

    def check_graph(
        self, name: str, graph: Graph, inputs: Sequence[Port], outputs: Sequence[Port], constants: Mapping[str, torch.Tensor]
    ) -> None:
        """Checks the global-view graph, on one device."""
        self._draw(inputs, constants)
        if any(one.dtype in LOW for node in graph.nodes if has_record(node) for one in records(node)):
            self.tolerance = LOW_TOLERANCE
        self._compare(name, interpret(graph, inputs, outputs, self.values))

    def check_program(self, name: str, program: PlainProgram, parts: MicrobatchSplit | None) -> None:
        """Checks the per-rank program, on simulated ranks. A program in microbatches is skipped until these are stages with a schedule."""
        self._draw(program.inputs, program.constants)
        ordered = bool(program.schedule) or program.pipeline is not None
        if ordered or program.microbatches == 1:
            program = program if ordered else replace(program, schedule=(Instruction("run", "main"),))
            self._compare(name, simulate(*self._first(program, parts)))

    def _draw(self, inputs: Sequence[Port], constants: Mapping[str, torch.Tensor]) -> None:
        for port in inputs:
            if port.key not in self.values:
                self.values[port.key] = _value(port, constants)

    def _first(self, program: PlainProgram, parts: MicrobatchSplit | None) -> tuple[PlainProgram, dict[str, torch.Tensor]]:
        """The program and its values; for a step that is the mean of its microbatches, its first microbatch, as in earlier passes."""
        if parts is None:
            return program, self.values
        inputs = [port.key for port in program.inputs if port.kind == "input"]
        whole = {
            key: torch.cat([self.values[key]] * parts.count, dim) for key, dim in zip(inputs, parts.dims, strict=True) if dim is not None
        }
        return first_microbatch(program), {**self.values, **whole}

    def _compare(self, name: str, found: Mapping[str, torch.Tensor]) -> None:
        """Compares `found` with the truth; outputs without one become it. Raises VerifyError with the pass and the worst output."""
        worst, worst_key = 0.0, ""
        for key, value in found.items():
            if key not in self.truth:
                continue
            kind = kind_of(key)
            largest = max(float(other.abs().max()) for k, other in self.truth.items() if kind_of(k) == kind and other.numel())
            wrong = error(value, self.truth[key], FLOOR * largest)
            if not wrong <= worst:
                worst, worst_key = wrong, key
        if not worst <= self.tolerance:
            raise VerifyError(
                f"the pass {name} changed the program's meaning: {worst_key} is off by {worst:.3g} (allowed {self.tolerance:.0e})"
            )
        self.truth.update({key: value for key, value in found.items() if key not in self.truth})


def interpret(graph: Graph, inputs: Sequence[Port], outputs: Sequence[Port], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a global-view graph on one device; returns outputs by key."""
    made = node_values(graph, (values[port.key].clone() for port in inputs))[output_of(graph)]
    return {port.key: value for port, value in zip(outputs, made, strict=True)}


def _value(port: Port, constants: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if port.kind == "constant":
        return constants[port.name]
    if port.kind == "number":
        of_optimizer = port.name[:1].isdigit()
        return torch.tensor(NUMBERS.get(port.name.split(".")[-1], 0.0) if of_optimizer else 0.5, dtype=torch.float64)
    if port.kind == "tangent":
        return torch.ones(port.shape, dtype=port.dtype)
    if port.kind == "random":
        return torch.tensor([7, 0])
    generator = torch.Generator().manual_seed(int(hashlib.sha256(port.key.encode()).hexdigest()[:8], 16))
    if port.kind == "state":
        return torch.rand(port.shape, generator=generator, dtype=torch.float64).to(port.dtype)
    return draw_values(port.shape, port.dtype, generator, positive=port.kind == "buffer")
