"""A saved program with its weights on one rank, ready to run without the model that it came from.

    weights.safetensors, or a saved state ── the ranges that this rank's tiles cover ──> buffers ─┐
    inputs.safetensors ── whole, or this rank's part ────────────────────────────────────────────> executor ──> outputs, whole everywhere

From weights, optimizer state begins as torch would create it, at step 0 with the seed that the program was saved with; a saved state has
its own. The optimizer's numbers (learning rates) are those at the time when the program was saved, until `set_numbers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from meshc.check import check_program
from meshc.errors import InputError, StateError, lines_of
from meshc.files.tensor_file import TensorFile, TensorReader
from meshc.ir import layouts
from meshc.ir.keys import is_a, name_of
from meshc.ir.mesh import axis_sizes
from meshc.ops.random import seed_step
from meshc.program import instance
from meshc.program.program import PlainProgram, Port
from meshc.runtime.comm.disk import COPIES
from meshc.runtime.comm.groups import Groups
from meshc.runtime.comm.transfers import Transfers
from meshc.runtime.failure.failed_rank import FailureBoard
from meshc.runtime.run.executor import Executor
from meshc.runtime.saved.checkpoint_folder import SavedState

WHOLE: Final = ("parameter", "buffer")
KEPT: Final = (*WHOLE, "state")


class LoadedProgram:
    """A program with its weights on this rank. `run` may be called many times; parameters and state are updated in place."""

    def __init__(
        self,
        program: PlainProgram,
        begin: TensorFile | SavedState,
        rank: int,
        device: torch.device,
        board: FailureBoard | None = None,
        seed: int | None = None,
    ) -> None:
        mesh = program.mesh
        groups = Groups(axis_sizes(mesh), rank, mesh.world_size, rank_of=torch.tensor(mesh.ranks))
        self.general = self.program = program
        self.device = device
        self.sizes = program.axis_sizes
        self.coordinates = coordinates = mesh.coordinates(rank)
        self._load = lambda fitting: Executor(_without_backward(fitting), groups, coordinates, device, board)
        self._executors: dict[tuple[int, ...], tuple[PlainProgram, Executor]] = {}
        if not program.dynamic:
            self.executor = self._load(program)
        self.transfers = Transfers(mesh, groups, rank, device)
        self.seed, self.step = int(program.info.get("seed", 0)), 0
        if isinstance(begin, SavedState):
            self.seed, self.step = begin.seed, begin.step
        self.buffers = self._read(begin)
        self.seed = self.seed if seed is None else seed
        self.numbers = {port.key: self._number(port) for port in program.inputs if port.kind == "number"}

    def _read(self, begin: TensorFile | SavedState) -> dict[str, Tensor]:
        """All that the program keeps, by key: of a saved state everything; of weights parameters and buffers, beside fresh state. Raises
        StateError naming all tensors that are missing or do not fit; extra tensors do not matter."""
        state = begin if isinstance(begin, SavedState) else None
        names = {port: port.name if state is None else port.key for port in self._mine(*(WHOLE if state is None else KEPT))}
        faults = []
        for port, name in names.items():
            if name not in begin.names:
                faults.append(f"{port.name} is missing")
            elif state is not None and state.tensors[name].dtype != port.dtype or begin.shape(name) != port.shape:
                kind = begin.kind(name) if isinstance(begin, TensorFile) else begin.tensors[name].dtype
                faults.append(f"{port.name} is {kind} {list(begin.shape(name))}, the program takes {port.dtype} {list(port.shape)}")
        what, advice = f"the weights in {begin.path} do", "save the program again with its weights"
        if state is not None:
            what = f"the state in {begin.path} does"
            advice = "give the state of the same model and optimizer, kept in as many bits (`meshc compile --optimizer-state`), or none"
        if faults:
            raise StateError(f"{what} not fit the program:\n    {lines_of(faults, 8)}\n  what to do: {advice}")
        found = {port.key: self._at_home(port, self._tile(begin, name, port)) for port, name in names.items()}
        return found | {port.key: self._at_home(port, self._fresh(begin, port)) for port in self._mine("state") if port.key not in found}

    def _mine(self, *kinds: str) -> list[Port]:
        """The ports of these kinds whose values are stored on this rank: of pipeline stages, its own."""
        return [port for port in self.program.inputs if port.kind in kinds and self.program.owns(port.key, self.coordinates)]

    def _tile(self, begin: TensorReader, name: str, port: Port) -> Tensor:
        return begin.tile(name, port.sharding, self.sizes, self.coordinates).to(port.dtype)

    def _fresh(self, begin: TensorReader, port: Port) -> Tensor:
        """Optimizer state before the first step: a constant, or a copy of the parameter (where the program says null)."""
        fill = self.program.info.get("fresh", {}).get(port.name, 0.0)
        if fill is None:
            return self._tile(begin, port.of, port)
        sharding = port.sharding or layouts.whole_sharding(port.shape)
        whole = torch.full((), fill, dtype=port.dtype).expand(port.shape)
        return layouts.take_tile(whole, sharding, self.sizes, self.coordinates)

    def _at_home(self, port: Port, tile: Tensor) -> Tensor:
        if port.storage != "device":
            return COPIES[port.storage](tile, port.name, self.device)
        on_host = port.kind == "state" and not port.shape  # step counts stay on the CPU, as in torch
        return tile if on_host else tile.to(self.device)

    def kept_tiles(self) -> list[tuple[Port, Tensor | None]]:
        """The ports of values kept between calls, each with this rank's tile as it is now; None if the rank has no part of it."""
        return [(port, self.buffers.get(port.key)) for port in self.program.inputs if port.kind in KEPT]

    def learning_rates(self) -> list[float]:
        """The learning rate of each of the optimizer's groups."""
        names = {name_of(key).partition("."): number for key, number in self.numbers.items()}
        return [float(number) for (group, _, name), number in names.items() if group.isdigit() and name == "lr"]

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        """Sets the optimizer's numbers, by name, from the next call on."""
        for key, tensor in self.numbers.items():
            tensor.fill_(numbers[name_of(key)])

    def _number(self, port: Port) -> Tensor:
        numbers = self.program.info.get("numbers", {})
        if port.name not in numbers:
            raise StateError(
                f"the program was saved without the number {port.name}: save it with program.save(), which writes them"
            )
        return torch.tensor(float(numbers[port.name]), dtype=torch.float64)

    def inputs(self, file: TensorFile | None) -> dict[str, Tensor]:
        """The program's inputs by key, from a file that holds them whole under their paths. Raises InputError naming every fault."""
        if self.general.dynamic:
            self._fit(file)
        ports = {port.name: port for port in self.program.inputs if port.kind == "input"}
        names = () if file is None else file.names
        faults = [f"{name} is missing" for name in ports if name not in names]
        faults += [f"{name} is no input of the program" for name in names if name not in ports]
        values: dict[str, Tensor] = {}
        for name, port in ports.items():
            if file is None or name not in names:
                continue
            shape = file.shape(name)
            value = file.tile(name, port.sharding if shape == port.shape else None, self.sizes, self.coordinates)
            if shape != port.shape or value.dtype != port.dtype:
                faults.append(f"{name} is {value.dtype} of shape {list(shape)}, the program takes {port.dtype} of shape {list(port.shape)}")
            values[port.key] = value.to(self.device)
        if faults:
            told = ", ".join(f"{name}: {port.dtype} of shape {list(port.shape)}" for name, port in ports.items()) or "nothing"
            raise InputError("the inputs do not fit the program:\n    " + "\n    ".join(faults) + f"\n  it takes {told}")
        return values

    def _fit(self, file: TensorFile | None) -> None:
        """Selects the program at the sizes of the next call's inputs; programs are memoised by sizes."""
        shapes = {} if file is None else {name: file.shape(name) for name in file.names}
        sizes = instance.sizes_of(self.general, shapes)
        key = tuple(sizes.values())
        if key not in self._executors:
            program = instance.at(self.general, sizes)
            check_program(program, "the saved program")
            self._executors[key] = program, self._load(program)
            if len(self._executors) > instance.KEPT:
                del self._executors[next(iter(self._executors))]
        self.program, self.executor = self._executors[key] = self._executors.pop(key)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One call. Returns outputs and metrics by key, whole, on every rank; all ranks call it."""
        values: dict[str, Tensor] = {**self.buffers, **self.numbers, **inputs}
        for port in self.program.inputs:
            if port.kind == "random":
                values[port.key] = seed_step(self.seed, self.step, self.device)
        with torch.no_grad():
            values = self.executor.run(values, self.step)
            for port in self.program.outputs:
                if port.key in self.buffers and values[port.key] is not self.buffers[port.key]:
                    self.buffers[port.key].copy_(values[port.key])
            with self.executor.failure_guard(self.step, "gather outputs"):
                results = [port for port in self.program.outputs if port.kind in ("output", "metric")]
                found = {port.key: self._whole(port, values[port.key]) for port in results}
        self.step += 1
        return found

    def _whole(self, port: Port, value: Tensor) -> Tensor:
        return value if port.sharding is None else self.transfers.whole(value, port.sharding)


def _without_backward(program: PlainProgram) -> PlainProgram:
    """A module's program without its backward: gradients are not needed here."""

    def takes_tangents(stage: str) -> bool:
        return stage in program.stages and any(is_a(key, "tangent") for key in program.stages[stage].inputs)

    return replace(program, schedule=tuple(one for one in program.schedule if not takes_tangents(one.stage)))
