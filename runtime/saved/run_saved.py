"""`meshc run`: one process, as the launcher started it, runs a saved program, and reads and stores its outputs and its state.

    DIR/outputs.safetensors     every output by its path (`logits`, `past_key_values.0.0`), whole (of several calls: outputs_0, ...),
                                and those metrics of a loss function that are more than a number
    DIR/metrics.json            of a training step: a row a call with step, loss, grad_norm, the loss function's metrics and the
                                learning rate of each group
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Final, cast

import torch
import torch.distributed as dist

from meshc import artifact, environment
from meshc.errors import InputError, StateError, lines_of
from meshc.files import tensor_file
from meshc.files.folders import write_file, write_text, writing
from meshc.files.tensor_file import TensorFile
from meshc.ir import Record
from meshc.optimizer.spec import NumberGuard
from meshc.program.program import PlainProgram
from meshc.runtime.agreement import descriptions
from meshc.runtime.agreement.compare import agree, to_all
from meshc.runtime.failure.failed_rank import FailureBoard, world_board
from meshc.runtime.saved.checkpoint_folder import SavedState, check_target, save_state
from meshc.runtime.saved.expert_moves import Placement
from meshc.runtime.saved.loaded_program import LoadedProgram
from meshc.text import printer
from meshc.text.libraries import libraries_of

WRITTEN: Final = "write it with safetensors.torch.save_file({name: tensor, ...}, path), by the names of the program's inputs"
"""Advice for a file of inputs that is invalid."""


@dataclass(frozen=True)
class RunRequest:
    """The request of the command line. `inputs` are files, a call each; without any the program is called once, without inputs. `numbers`
    is a file of the optimizer's numbers by step. After each `rebalance_every` calls experts move by their load.
    """

    path: str
    inputs: Sequence[str]
    outputs: str
    state: str | None = None
    save_state: str | None = None
    backend: str | None = None
    seed: int | None = None
    allow_edited: bool = False
    allow: Sequence[str] = ()
    numbers: str | None = None
    rebalance_every: int | None = None


def run_command(program: PlainProgram, path: str | Path, rest: str = "--inputs FILE --outputs DIR") -> str:
    others = sorted({library for stage in program.stages.values() for library in libraries_of(stage.graph)})
    allow = f"--allow {' '.join(others)} " if others else ""
    return f"torchrun --nproc-per-node {program.mesh.world_size} -m meshc run {path} {allow}{rest}"


def run_saved(ask: RunRequest) -> None:
    """Run a saved program in this process. Raises StateError if the launcher started another number of ranks than the program has."""
    program = artifact.load(ask.path, allow_edited=ask.allow_edited, allow=ask.allow)
    world = environment.world_size()
    _check(program, ask, world)
    device = torch.device("cpu")
    if program.mesh.device_type == "cuda":
        device = torch.device("cuda", environment.local_rank())
        torch.cuda.set_device(device)
    board = None
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        board = world_board()
    try:
        with board.guard(0, "load") if board else nullcontext():
            if board is not None:
                given = {"--backend": ask.backend, "--seed": ask.seed}
                given["--numbers"] = None if ask.numbers is None else _digest(ask.numbers)
                given |= {"--rebalance-every": ask.rebalance_every}
                given |= {"number of --inputs": len(ask.inputs), "--save-state": ask.save_state is not None}
                agree(board, "load", descriptions.describe_run(program, ask.path, ask.state, given), descriptions.advice)
            _refuse_other_backend(program, ask)
            _run_rank(program, ask, device, board)
    finally:
        if board is not None:
            board.close()
            dist.destroy_process_group()


def _check(program: PlainProgram, ask: RunRequest, world: int) -> None:
    if world != program.mesh.world_size:
        inputs = f"--inputs {' '.join(ask.inputs)} " if ask.inputs else ""
        raise StateError(
            f"{ask.path} is a program for {program.mesh.world_size} ranks (mesh {program.mesh}), but {world} "
            f"{'was' if world == 1 else 'were'} started\n"
            f"  what to do: {run_command(program, ask.path, f'{inputs}--outputs {ask.outputs}')}"
        )
    missing = [name for name in ask.inputs if not Path(name).is_file()]
    if missing:
        raise InputError(f"there is no file {', '.join(missing)}: --inputs takes safetensors files, one for each call")
    if ask.rebalance_every is not None and ask.rebalance_every < 1:
        raise InputError(f"--rebalance-every {ask.rebalance_every}: a number of calls, 1 or more")
    if ask.save_state is not None:
        check_target(ask.save_state)


def _refuse_other_backend(program: PlainProgram, ask: RunRequest) -> None:
    if ask.backend not in (None, program.backend):
        raise StateError(
            f"{ask.path} is a program for the backend {program.backend}, and --backend asks for {ask.backend}: what a program's text says "
            "is what runs, and the text for another backend is another one\n"
            f"  what to do: leave out --backend, or compile again for {ask.backend} (`meshc compile --backend {ask.backend}`, or "
            f'meshc.compile(..., backend="{ask.backend}"))'
        )


def _run_rank(program: PlainProgram, ask: RunRequest, device: torch.device, board: FailureBoard | None) -> None:
    rank = dist.get_rank() if board is not None else 0
    with SavedState(ask.state) if ask.state is not None else artifact.open_weights(ask.path) as begin:
        loaded = LoadedProgram(program, begin, rank, device, board, ask.seed)
    schedule = None if ask.numbers is None else NumbersByStep(ask.numbers, program)
    placement = None if ask.rebalance_every is None else Placement(loaded, ask.path)
    writer = _OutputWriter(program, Path(ask.outputs), len(ask.inputs)) if rank == 0 else None
    for number, name in enumerate(ask.inputs or (None,), 1):
        with TensorFile(Path(name), advice=WRITTEN) if name is not None else nullcontext() as file:
            inputs = loaded.inputs(file)
        step = loaded.step
        if schedule is not None:
            loaded.set_numbers(schedule.at(step))
        found = loaded.run(inputs)
        if writer is not None:
            writer.call(step, found, loaded.learning_rates())
        if placement is not None and number % cast(int, ask.rebalance_every) == 0 and number < len(ask.inputs):
            report = placement.by_load(found)
            if writer is not None:
                print(report)
    if ask.save_state is not None:
        if placement is not None:
            placement.home()  # saved states have every expert in its own place
        owners = program.pipeline.owners if program.pipeline is not None else None
        save_state(ask.save_state, program.mesh, rank, loaded.kept_tiles(), loaded.seed, loaded.step, partial(to_all, board), owners)
    if writer is not None:
        writer.close(ask.save_state)


def _digest(path: str) -> str:
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return "it cannot be read"  # `NumbersByStep` raises the error with the reason


class _OutputWriter:
    """Stores and prints the results of calls, on one rank."""

    def __init__(self, program: PlainProgram, folder: Path, calls: int) -> None:
        self.program, self.folder, self.several = program, folder, calls > 1
        self.rows: list[dict[str, object]] = []
        self.calls = 0
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def call(self, step: int, found: Mapping[str, torch.Tensor], rates: list[float]) -> None:
        told = [port for port in self.program.outputs if port.kind == "output" or (port.kind == "metric" and port.shape)]
        outputs = {port.name: found[port.key].cpu().contiguous().clone() for port in told}
        file = self.folder / (f"outputs_{self.calls}.safetensors" if self.several else "outputs.safetensors")
        write_file(file, lambda made: tensor_file.write(made, outputs))
        for name, value in outputs.items():
            kind = printer.print_type(Record(tuple(value.shape), value.dtype))
            print(f"{name}: {kind}{f' = {value.item()}' if value.numel() == 1 else ''}")
        self.calls += 1
        if self.program.mode == "step":
            scalars = [port for port in self.program.outputs if port.kind == "metric" and not port.shape]
            metrics = {port.name: found[port.key].item() for port in scalars}
            self.rows.append({"step": step, "loss": float(next(iter(outputs.values()))), **metrics, "lr": rates})
            write_text(self.folder / "metrics.json", json.dumps(self.rows, indent=1) + "\n")

    def close(self, state: str | None) -> None:
        print(f"stored in {self.folder}")
        if state is not None:
            print(f"parameters, optimizer state, seed and step stored in {state}; go on from there with --state {state}")
        elif self.program.mode == "step":
            print("the updated parameters and optimizer state were not stored; --save-state DIR stores them")


# Schedule of the optimizer's numbers (learning rates) for `meshc run`, read from a file.
#
#     {"step": 0, "lr": 1e-5}                                a row holds from its step on, until the next row's
#     {"step": 100, "lr": [3e-4, 1e-4], "weight_decay": 0.1} a number is every group's, a list has one for each
#     {"step": 200, "1.lr": 0.0}                             or the name that `meshc show` prints: group 1's
#
# The file has a row a line, or is a JSON list of rows. Steps are the program's own, which a saved state goes on counting, so one file
# serves a resumed job too. A number that no row has named yet has the value that the program was saved with.
# Numbers of Python that the program takes are named as it names them: {"step": 0, "model.temperature": 1.0}.


class NumbersByStep:
    """The optimizer's numbers at each step. Raises InputError naming every fault of the file, StateError for numbers that the program was
    not compiled for."""

    def __init__(self, path: str | Path, program: PlainProgram) -> None:
        self.path = path
        self.saved: dict[str, float] = dict(program.info.get("numbers", {}))
        self.names = [port.name for port in program.inputs if port.kind == "number"]
        if not self.names:
            raise InputError(f"--numbers {path}: the program has no numbers: it is no training step, or its optimizer has none")
        rows, faults = _rows(path), list[str]()
        self.changes = [(self._step(row, line, faults), self._row_numbers(row, line, faults)) for line, row in enumerate(rows, 1)]
        steps = [step for step, _ in self.changes]
        faults += [f"row {line}: step {b} comes after step {a}" for line, (a, b) in enumerate(pairwise(steps), 2) if b <= a]
        if faults:
            shown, names = lines_of(faults, 6), ", ".join(self.names)
            raise InputError(f"--numbers {path} is no schedule of this program:\n    {shown}\n  it has the numbers {names}")
        self._check_guards(program)

    def at(self, step: int) -> dict[str, float]:
        """The numbers of a step, by name."""
        found = dict(self.saved)
        for begin, numbers in self.changes:
            if begin <= step:
                found |= numbers
        return found

    def _step(self, row: Mapping[str, object], line: int, faults: list[str]) -> int:
        step = row.get("step")
        if type(step) is int and step >= 0:
            return step
        faults.append(f'row {line} has no "step": the first step that it is for, counted from 0')
        return line

    def _row_numbers(self, row: Mapping[str, object], line: int, faults: list[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, value in row.items():
            mine = [name] if name in self.names else [one for one in self.names if one.partition(".")[2] == name]
            values = value if isinstance(value, list) else [value] * len(mine)
            if name == "step":
                continue
            if not mine:
                faults.append(f"row {line}: {name} is no number of the program")
            elif len(values) != len(mine):
                faults.append(f"row {line}: {name} has {len(values)} values, and {len(mine)} groups have it")
            elif not all(isinstance(one, int | float) and not isinstance(one, bool) and isfinite(one) for one in values):
                faults.append(f"row {line}: {name} is {value!r}, no number")
            else:
                found |= {key: float(one) for key, one in zip(mine, values, strict=True)}
        return found

    def _check_guards(self, program: PlainProgram) -> None:
        """Raises StateError for a number on the other side of a compiled-in branch of Python code, the optimizer's or the model's (whose
        numbers have group -1)."""
        faults = []
        for group, number, relation, constant in program.info.get("guards", []):
            name = number if group < 0 else f"{group}.{number}"
            guard = NumberGuard(name, relation, constant)
            now = guard.outcome(self.saved)
            for step, _ in self.changes:
                if guard.outcome(self.at(step)) != now:
                    what = "another value than it was saved with" if relation == "is" else f"{number} {relation} {constant:g} is {not now}"
                    faults.append(f"from step {step}: {name} = {self.at(step)[name]:g}, where {what}")
        if faults:
            raise StateError(
                f"--numbers {self.path} asks for what the program was not compiled for:\n    {lines_of(faults, 4)}\n"
                "  why: the code that reads this number branches on it, and one branch was compiled\n"
                "  what to do: save a second program with the number as it is from that step on, and go on with --state"
            )


def _rows(path: str | Path) -> Sequence[Mapping[str, object]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--numbers {path} cannot be read: {error}") from error
    try:
        whole = text.lstrip().startswith("[")
        rows = json.loads(text) if whole else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InputError(f"--numbers {path} is no JSON, a row a line or a list of rows: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f'--numbers {path} has no rows: each is like {{"step": 0, "lr": 0.001}}')
    found: Sequence[Mapping[str, object]] = rows
    return found
