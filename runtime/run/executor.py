"""Execution of a program's schedule on one rank, instruction by instruction.

Values are stored by key: that of a port (`parameter:w`, `input:x`), or of a value between stages (`value:...`, `part:...`, `sum:...`).
Keys of collectives that start early hold the collective in flight instead of a tensor; only stages read it, and wait for it.
A program of one stage has no special case; a schedule of one instruction is a list like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from meshc import environment
from meshc.errors import InputError, StateError
from meshc.ir import spmd
from meshc.ir.keys import key_of
from meshc.pipelining.pipeline_stages import slot
from meshc.program.accumulate import ACCUMULATES, is_added, whole_of
from meshc.program.program import Instruction, PlainProgram, Stage
from meshc.program.rank_instructions import last_reads, steps_of
from meshc.runtime.agreement.compare import all_refuse
from meshc.runtime.comm.channels import Channels
from meshc.runtime.comm.groups import Groups
from meshc.runtime.failure.failed_rank import FailureBoard
from meshc.runtime.run.codegen import RunStage, generate, maker
from meshc.runtime.run.recorder import TraceRecorder


@dataclass(frozen=True)
class LoadedStage:
    """A stage on this rank: `perform` reads its inputs from the values by key, and adds its outputs.

    outputs  without those that the stage itself adds to sums
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: RunStage

    def perform(
        self, env: dict[str, torch.Tensor], microbatch: int = 0, last: Collection[str] = (), done: Callable[[str], None] | None = None
    ) -> None:
        """`last`: keys that nothing reads after this; the stage frees them as it runs. `done` is called with the keys of sums added to."""
        slots = [slot(key, microbatch) for key in self.inputs]
        inputs = [env.pop(name) if name in last else env[name] for name in slots]
        results = self.run(inputs, microbatch, env, done)
        env.update({slot(key, microbatch): value for key, value in zip(self.outputs, results, strict=True)})


@dataclass(frozen=True)
class ScheduledInstruction:
    """One instruction of the schedule, with what starts and ends at it.

    last    keys of values that no later instruction reads
    starts  of a run: collectives that start within it
    text    as messages name it
    """

    step: Instruction
    last: frozenset[str]
    starts: list[EarlyStart]
    text: str


def _load_stage(stage: Stage, run: RunStage) -> LoadedStage:
    return LoadedStage(stage.inputs, tuple(key for key in stage.outputs if not is_added(key)), run)


def needed_groups(program: PlainProgram) -> list[tuple[str, ...]]:
    """Axes of every collective of a program, each once, in program order: the same list on all ranks."""
    nodes = (node for stage in program.stages.values() for node in stage.graph.nodes if spmd.is_collective(node.target))
    return [axes for axes in dict.fromkeys(tuple(node.args[1]) for node in nodes) if axes != ("mb",)]


class Executor:
    """A program loaded on this rank. `run(values, step)` returns the program's outputs by key."""

    def __init__(
        self,
        program: PlainProgram,
        groups: Groups,
        coordinates: Mapping[str, int],
        device: torch.device,
        board: FailureBoard | None = None,
    ) -> None:
        self.program = program
        self.device = device
        self.board = board
        groups.prepare(needed_groups(program))
        listed = _runs_with_sums(program, steps_of(program, coordinates))
        self.channels = None if program.pipeline is None else Channels(program, groups, coordinates, device)
        here = self._here if board is not None else None
        make = maker(program.backend)
        self._make: Callable[[Stage], RunStage] = lambda stage: make(stage, groups, coordinates, device, here)
        mine = dict.fromkeys(step.stage for step in listed if step.op == "run")
        self.stages: dict[str, LoadedStage] = {name: self.load(program.stages[name]) for name in mine}
        started = {step.stage: program.stages[step.stage] for step in listed if step.op == "start"}
        self.started = {name: _load_stage(stage, generate(stage, groups, coordinates, device, here)) for name, stage in started.items()}
        self.plays = self._plays(listed)
        file = environment.trace_file()
        self.recorder = None if file is None else TraceRecorder(program, coordinates, device, groups.world, board, file)
        self._rows: dict[str, dict[int, torch.Tensor]] = {}
        """By the key of a joined value, its parts so far in this call, by microbatch."""
        self.constants = {key_of("constant", name): tensor.to(device) for name, tensor in program.constants.items()}

    def load(self, stage: Stage) -> LoadedStage:
        """A stage, executable on this rank. A stage from outside the program must use no other groups than the program does."""
        return _load_stage(stage, self._make(stage))

    def _plays(self, listed: Sequence[Instruction]) -> list[ScheduledInstruction]:
        """The instructions, each run with the collectives that start within it."""
        found: list[ScheduledInstruction] = []
        starts: list[EarlyStart] = []  # of the last run
        for step, last in zip(listed, last_reads(self.program, listed), strict=True):
            if step.op == "start":
                outputs = self.program.stages[step.during].outputs
                grown = frozenset(whole[1] for key in outputs if (whole := whole_of(key)) is not None)
                starts.append(EarlyStart(partial(self.started[step.stage].perform, last=last), grown.intersection(step.keys)))
                continue
            if step.op == "run":
                starts = []
            found.append(ScheduledInstruction(step, last, starts if step.op == "run" else [], instruction_text(step)))
        return found

    def _here(self, instruction: str) -> None:
        assert self.board is not None
        self.board.instruction = instruction

    def run(self, values: dict[str, torch.Tensor], step: int = 0) -> dict[str, torch.Tensor]:
        """Run the whole schedule. `values` holds every input port by key; parameters and states are updated in place."""
        env = {**values, **self.constants}
        self._rows.clear()  # of a call that failed
        if self.channels is not None:
            self.channels.begin()
        with self.record_call(step):
            for play in self.plays:
                with self.failure_guard(step, play.text):
                    self.perform(play.step, env, play.last, sum_listener(play.starts, env) if play.starts else None)
            if self.channels is not None:
                with self.failure_guard(step, "recv what the last stages have sent"):
                    self.channels.finish(env)
        return env

    def record_call(self, step: int) -> AbstractContextManager[None]:
        """A context for a call, at whose end the ranks write their trace, if MESHC_TRACE is set."""
        return nullcontext() if self.recorder is None else self._write_trace(self.recorder, step)

    @contextmanager
    def _write_trace(self, recorder: TraceRecorder, step: int) -> Iterator[None]:
        with recorder.call():
            yield
        with self.failure_guard(step, "write the trace"):
            recorder.collect()

    def record_instruction(self, instruction: Instruction, arrived: Collection[str] = ()) -> AbstractContextManager[None]:
        """A context that records one instruction, whose inputs `arrived` were waited for."""
        return nullcontext() if self.recorder is None else self.recorder.record_instruction(instruction, arrived)

    def failure_guard(self, step: int, text: str) -> AbstractContextManager[None]:
        """A context that reports a failure of this rank to the others, and raises theirs here."""
        return nullcontext() if self.board is None else self.board.guard(step, text)

    def perform(
        self, instruction: Instruction, env: dict[str, torch.Tensor], last: Collection[str] = (), done: Callable[[str], None] | None = None
    ) -> None:
        """Performs one instruction. `last`: keys that no later one reads. `done` is called with the key of each sum added to."""
        arrived = self._await(instruction, env)
        with self.record_instruction(instruction, arrived):
            try:
                self._do(instruction, env, last, done)
            except InputError as error:  # checks of values that every rank has come first: nothing has been sent
                if error.of_all and self.board is not None and self.channels is None:
                    error.everywhere = all_refuse(self.board, error)
                raise

    def _await(self, instruction: Instruction, env: dict[str, torch.Tensor]) -> Collection[str]:
        """Waits for the messages that an instruction reads; returns their keys."""
        if self.channels is None or instruction.op not in ("run", "send"):
            return ()
        keys = self.stages[instruction.stage].inputs if instruction.op == "run" else instruction.keys
        arrived = self.channels.wait_for_values([slot(key, instruction.microbatch) for key in keys], env)
        if instruction.op == "run" and instruction.stage.startswith("after_"):
            self.channels.settle()  # the stage may write what was sent
        return arrived

    def _do(
        self, instruction: Instruction, env: dict[str, torch.Tensor], last: Collection[str], done: Callable[[str], None] | None
    ) -> None:
        if instruction.op == "run":
            self.stages[instruction.stage].perform(env, instruction.microbatch, last, done)
        elif instruction.op == "join":
            rows = self._rows.setdefault(instruction.into, {})
            rows[instruction.microbatch] = env.pop(instruction.value)
            if len(rows) == self.program.microbatches:
                del self._rows[instruction.into]
                env[instruction.into] = torch.cat([rows[k] for k in sorted(rows)])
        elif instruction.op == "send" and self.channels is not None:
            self.channels.send(instruction, env)
            for name in last:
                env.pop(name, None)
        elif instruction.op == "recv" and self.channels is not None:
            self.channels.receive(instruction)
        else:
            raise StateError(f"the schedule has an instruction that this runtime does not know: {instruction.op}")


def _runs_with_sums(program: PlainProgram, steps: Sequence[Instruction]) -> list[Instruction]:
    """The schedule without the instructions that add parts to sums: stages do that as they compute the parts. Starts stay behind their run.

    Raises StateError for a schedule, such as an edited one, in which these instructions do not follow their run.
    """
    advice = "\n  what to do: put that instruction right behind the run, or compile and save the program again"
    found: list[Instruction] = []
    wanted: set[str] = set()
    run: Instruction | None = None  # the last one, and nothing but its sums, rows and starts since
    for step in steps:
        if step.op in ACCUMULATES:
            if step.value not in wanted:
                raise StateError(f"the schedule takes {step.value} into {step.into} where no run of a stage has just made it{advice}")
            wanted.discard(step.value)
            continue
        if step.op == "start" and (run is None or (run.stage, run.microbatch) != (step.during, step.microbatch)):
            raise StateError(f"the schedule starts {step.stage} elsewhere than behind the run of {step.during} that it names{advice}")
        if wanted and step.op != "join":
            break
        found.append(step)
        if step.op == "run":
            run, wanted = step, {key for key in program.stages[step.stage].outputs if is_added(key)}
        elif step.op not in ("join", "start"):
            run = None
    if wanted:
        raise StateError(f"the schedule does nothing with {min(wanted)}: its sum takes it in right after its stage has run{advice}")
    return found


def instruction_text(step: Instruction) -> str:
    """An instruction as text for failure messages."""
    if step.op in ("send", "recv"):
        what = f"{step.stage} of microbatch {step.microbatch}" if step.stage else ", ".join(step.keys)
        return f"{step.op} {what} {'to' if step.op == 'send' else 'from'} pipeline rank {step.peer}"
    return f"{step.op} {step.stage} {step.microbatch}"


# Collectives that start while a stage runs, as the program says.
#
#     run(B0.3); add(.., sum:g2); add(.., sum:g1); add(.., sum:g0); start(start_0_all_reduce, keys=(sum:g2, sum:g1)); ...
#
#     B0.3: ... part:g2 -> sum:g2, part:g1 -> sum:g1: the next start has its sums, so all_reduce(cat(g2, g1)) begins; part:g0 -> ...
#     after_0: r = early:0_all_reduce.wait()
#
# Nothing is decided here: the starts of a run begin in the order of the schedule, each as soon as the run has added to all of its sums.


@dataclass(frozen=True)
class EarlyStart:
    """Start of one collective within a run.

    perform  takes the sums out of the values by key, and adds the collective in flight
    sums     keys of those sums that the run adds to
    """

    perform: Callable[[dict[str, torch.Tensor]], None]
    sums: frozenset[str]


def sum_listener(starts: Sequence[EarlyStart], env: dict[str, torch.Tensor]) -> Callable[[str], None]:
    """A callback for the key of each sum that a run has added to; performs `starts` in order."""
    added: set[str] = set()
    left = list(starts)

    def note_sum(key: str) -> None:
        added.add(key)
        while left and left[0].sums <= added:
            left.pop(0).perform(env)

    return note_sum
