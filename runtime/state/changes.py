"""Changes of stored tensors from outside programs: found by version counters, and compared between ranks.

    model.load_state_dict(file), weight.mul_(3), optimizer.state[weight]["exp_avg"].zero_()
              │ torch counts writes in `_version`
    look      finds tensors whose version differs from that after the last program, or optimizer step (`record`)
    tell      notes them, before the next run, in a stream of the ranks that hold them: the board compares streams beside
              the runs (`failure/step_numbers.py`), so a rank never waits

A write through a DTensor must be made by every rank. A write through `to_local()` concerns this rank's part and its replicas alone. Where
ranks have changed the same tensors, values of replicas are compared (`replicas.py`): at the first such run, and ever more rarely if every
call has one, as in loops that update parameters by hand. Some writes torch does not count (`parameter.data`, numpy); they are found by
value, at runs 16, 32, ... 1024 and every 1024th, and when state is saved.

Streams also have the program that runs and the number of optimizer steps, so that messages of different programs are not mixed up.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshc.ir.storage_moves import TIERS
from meshc.optimizer.spec import GRADIENT
from meshc.runtime.agreement.compare import rendezvous
from meshc.runtime.comm.stage_transfers import StageTransfers
from meshc.runtime.failure.failed_rank import FailureBoard, current_board
from meshc.runtime.failure.step_numbers import CHANGES, NOT_THERE, Difference
from meshc.runtime.state import random_draws, replicas
from meshc.runtime.state.stored_tensor import StoredTensor, versions_of

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store

RUNS: Final = "runs"
PROGRAM: Final = "the program that runs"
STEPS: Final = "steps of optimizers since the run before"

SEEN: Final = "brought up to date"
EXCHANGED: Final = "exchanged"

NEAR: Final = 64
"""Values that change again within this number of runs are changed in a loop."""
RARE: Final = 1024
FIRST_LOOK: Final = 16
"""The first run at which the values of all replicas are compared."""

_STORES: Final = itertools.count()
"""Numbers of stores; all ranks build stores in one order."""

Version = tuple[int, ...]


class Changes:
    """Changes of one store. `ranks_of` says which ranks hold a tensor; `steps` counts steps of optimizers outside programs."""

    def __init__(self, store: Store) -> None:
        self._store: Store = weakref.proxy(store)  # no circle: what the store holds is free as soon as its model is
        self._number = next(_STORES)
        self.steps = 0
        self._held: list[StoredTensor] = []
        self._lives: list[Tensor] = []
        """The DTensors of `_held`, which programs do not write through."""
        self._parts: list[Tensor] = []
        """This rank's part of each of `_held`."""
        self._lives_then: list[int] = []
        self._parts_then: list[int] = []
        self._anew = True
        self._read: set[str] = set()
        self._uncompared: dict[str, tuple[int, ...]] = {}
        """Changes not yet announced: by name the ranks that should have made the change."""
        self._told: dict[str, tuple[int, ...]] = {}
        """Announced changes since the last run, likewise."""
        self._unseen: dict[str, StoredTensor] = {}
        """Changed tensors whose values were not compared since, by key."""
        self._noted_steps: dict[tuple[int, ...], int] = {}
        self._groups: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._hurried, self._asked = Pace(), Pace()
        self._given = 0
        self._given_at = -1
        self._by_live: dict[int, StoredTensor] = {}
        """Parameters by the identity of their live tensor."""
        self._states: dict[tuple[int, str], Version] = {}

    # ---- what is changed

    def renew(self) -> None:
        """The store holds other tensors than before: list them anew."""
        self._anew = True

    def follow(self, keys: Iterable[str]) -> None:
        """Adds keys that programs read: a buffer that no program reads may differ between ranks."""
        self._read.update(held.key for held in map(self._store.find, keys) if held is not None)
        self._anew = True

    def look(self, replaced: Iterable[StoredTensor] = ()) -> None:
        """Finds changes since `record`. replaced: stored tensors that were replaced in the model."""
        self._list()
        lives, parts = versions_of(self._lives), versions_of(self._parts)
        for held in filter(self._is_followed, replaced):
            self._find(held, whole=True)
        if lives == self._lives_then and parts == self._parts_then:
            return
        whole = {id(live) for live, one, other in zip(self._lives, lives, self._lives_then, strict=True) if one != other}
        for held, one, other in zip(self._held, parts, self._parts_then, strict=True):
            if one != other or id(held.live) in whole:
                self._find(held, id(held.live) in whole)
        self._lives_then, self._parts_then = lives, parts

    def record(self) -> None:
        """Writes to parts since `look` were a program's, or follow from what `look` has found: takes their versions as known."""
        self._list()
        self._parts_then = versions_of(self._parts)

    def _find(self, held: StoredTensor, whole: bool) -> None:
        ranks = self.ranks_of(held, whole)
        if len(ranks) > len(self._uncompared.get(held.name, ())):
            self._uncompared[held.name] = ranks
        self._unseen[held.key] = held

    def _list(self) -> None:
        """Lists the followed tensors, with their known versions; for new ones the present versions."""
        if not self._anew and not self._store.moves:  # of experts that have been moved there are others after each step
            return
        self._anew = False
        lives = dict(zip(map(id, self._lives), self._lives_then, strict=True))
        parts = dict(zip(map(id, self._parts), self._parts_then, strict=True))
        self._held = [held for held in self._store.held.values() if self._is_followed(held)]
        self._lives = [held.live for held in self._held if isinstance(held.live, DTensor)]
        self._parts = [_part(held) for held in self._held]
        self._by_live = {id(held.live): held for held in self._held if not held.of}
        self._lives_then = [lives.get(id(live), live._version) for live in self._lives]
        self._parts_then = [parts.get(id(part), part._version) for part in self._parts]

    def _is_followed(self, held: StoredTensor) -> bool:
        """Excludes gradients, which `zero_grad` may clear, tensors of this rank alone, those of other stages, and inference tensors, which
        have no version."""
        shared = len(self.ranks_of(held, whole=True)) > 1
        if held.slot == GRADIENT or not shared or not _is_here(held) or held.live.is_inference() or _part(held).is_inference():
            return False
        return isinstance(held.live, DTensor) or bool(held.of) or held.key in self._read

    # ---- an optimizer that steps parameters itself

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Finds the user's changes before an optimizer step."""
        self.look()
        for (live, slot), version in self._states_of(optimizer).items():
            before = self._states.get((live, slot), version)
            if before != version:
                held = self._by_live[live]
                self._uncompared[f"{held.name}/{slot}"] = self.ranks_of(held, whole=before[:2] != version[:2])

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the writes of the step as known, and counts the step."""
        self.record()
        self._lives_then = versions_of(self._lives)
        self.steps += 1
        self._states.update(self._states_of(optimizer))

    def _states_of(self, optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Version]:
        """Identity and versions of each state tensor of the optimizer, by the parameter's id and the slot's name."""
        self._list()
        found: dict[tuple[int, str], Version] = {}
        for parameter, slots in optimizer.state.items():
            if id(parameter) in self._by_live:
                for slot, value in slots.items():
                    if isinstance(value, Tensor) and not value.is_inference():
                        part = value._local_tensor._version if isinstance(value, DTensor) else 0
                        found[id(parameter), slot] = id(value), value._version, part
        return found

    # ---- who holds what

    def ranks_of(self, held: StoredTensor, whole: bool) -> tuple[int, ...]:
        """The ranks that hold the same part of a tensor as this rank; whole: those that hold any part."""
        axes = tuple(axis.name for axis in held.home.mesh.axes if axis.size > 1)
        return self.group(axes if whole or not held.placements else random_draws.replicated_axes(held))

    def group(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from this one along these axes only."""
        found = self._groups.get(tuple(axes))
        if found is None:
            rank = dist.get_rank()
            found = next(tuple(sorted(row)) for row in self._store.transfers.groups.members(axes) if rank in row)
            self._groups[tuple(axes)] = found
        return found

    # ---- what ranks tell each other

    def open(self, board: FailureBoard, keys: Iterable[str], reached: Iterable[Sequence[str]]) -> None:
        """Opens the streams of a program, before its first run. keys: of its stored tensors; reached: axes that its runs send along."""
        self.follow(keys)
        self._list()
        everybody = tuple(range(board.world_size))
        board.numbers.joint(RUNS, everybody, other_run)
        board.numbers.joint(CHANGES, everybody, other_change)
        for axes in reached:
            if len(ranks := self.group(axes)) > 1:
                board.numbers.joint(RUNS, ranks, other_run)
        for held in self._held:
            for whole in (True, False):
                if len(ranks := self.ranks_of(held, whole)) > 1:
                    board.numbers.joint(CHANGES, ranks, other_change)

    def tell(self, sends: bool) -> None:
        """Announces the changes since the last call. sends: ranks exchange parts because of the changes, in which a rank without the
        change takes no part; so ranks meet first, and a waiting rank is told the difference."""
        if self._uncompared:
            self._note(self._uncompared, "changed", sends)
            self._told |= self._uncompared
            self._uncompared = {}

    def tell_stale(self) -> None:
        """Announces that this rank refreshes outdated copies, which ranks do together. They meet."""
        stale = [held for held in self._store.held.values() if held.stale and (held.lags or _is_here(held))]
        everybody = tuple(range(dist.get_world_size()))
        self._note({held.name: everybody if held.lags else self.ranks_of(held, whole=True) for held in stale}, SEEN, sends=True)

    def _note(self, what: Mapping[str, tuple[int, ...]], done: str, sends: bool) -> None:
        board = current_board()
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in what.items():
            by_ranks.setdefault(ranks, []).append(name)
        for ranks, names in by_ranks.items():
            if board is not None and len(ranks) > 1:
                stream = board.numbers.joint(CHANGES, ranks, other_change)
                stream.note(tuple(sorted(names)), (done,) * len(names))
                if sends:
                    rendezvous(board, ranks, "exchange parts of what was changed", stream.count)

    def note_run(self, board: FailureBoard, axes: Sequence[str], what: str) -> None:
        """Notes the begin of a run that sends along `axes`. Raises StateError where values of replicas differ."""
        reached = self.group(axes)
        if len(reached) < 2:
            return
        for ranks, stream in board.numbers.joint_streams(RUNS, reached):
            since = self.steps - self._noted_steps.get(ranks, 0)
            self._noted_steps[ranks] = self.steps
            stream.note((PROGRAM, STEPS), (what, since))
        board.numbers.note_sends(reached)
        if len(reached) == board.world_size:
            self._told = {}
            self._compare_now_and_then(board, board.numbers.joint(RUNS, reached, other_run).count)

    def _compare_now_and_then(self, board: FailureBoard, run: int) -> None:
        stored: Collection[StoredTensor] = ()
        if self._unseen and self._hurried.due(run):
            stored = self._unseen.values()
        elif run >= FIRST_LOOK and is_rare_turn(run):
            stored = self._compared_tensors()
        if stored:
            self._compare(board, f"run {run}", stored, {}, 0.0)
            self._unseen = {}

    def _compared_tensors(self) -> list[StoredTensor]:
        """Stored tensors but those of tiers that are compared only when all ranks save."""
        return [held for held in self._held if held.storage not in TIERS or TIERS[held.storage].compared]

    def compare(self, wait_s: float) -> None:
        """Before all ranks save state: compares their changes since the last run, and the values of replicas. Ranks that come within
        `wait_s` seconds are compared; the last one to come always is. Raises StateError."""
        board = current_board()
        if board is None or board.world_size < 2:
            return
        run = self._last_run(board)
        self._given = self._given + 1 if run == self._given_at else 1
        self._given_at = run
        self._compare(board, f"state {self._given} behind run {run}", self._held, self._told | self._uncompared, wait_s)

    def compare_if_asked(self) -> None:
        """Before a rank saves state, which others may not do: compares with those that do, between the same runs and after the same
        changes; ever more rarely, if repeated. Raises StateError."""
        board = current_board()
        if board is None or board.world_size < 2:
            return
        run = self._last_run(board)
        if self._asked.due(run):
            changed = "; ".join(sorted(self._told | self._uncompared))
            when = f"asked behind run {run}, {hashlib.blake2b(changed.encode(), digest_size=8).hexdigest()}"
            self._compare(board, when, self._compared_tensors(), {}, 0.0)

    def _last_run(self, board: FailureBoard) -> int:
        self.look()
        return board.numbers.joint(RUNS, tuple(range(board.world_size)), other_run).count

    def _compare(
        self, board: FailureBoard, when: str, stored: Iterable[StoredTensor], changed: Mapping[str, Sequence[int]], wait_s: float
    ) -> None:
        with torch.no_grad():
            values = replicas.sketches([held for held in stored if len(self.ranks_of(held, whole=False)) > 1])
        holders = {held.name: self.ranks_of(held, whole=False) for held in self._held}
        here = replicas.Account(values, {name: list(ranks) for name, ranks in changed.items()})
        replicas.compare(board, f"{self._number}/{when}", here, holders, wait_s)


class Pace:
    """Back-off for a repeated check: due at times 1, 2, 4, ... 1024, and every 1024th; restarts after NEAR runs without one."""

    def __init__(self) -> None:
        self._last, self._times = -NEAR, 0

    def due(self, run: int) -> bool:
        self._times = self._times + 1 if run - self._last <= NEAR else 1
        self._last = run
        return is_rare_turn(self._times)


def is_rare_turn(count: int) -> bool:
    """Whether `count`, from 1, is a power of two up to RARE or a multiple of RARE."""
    return count % RARE == 0 if count > RARE else count & (count - 1) == 0


def _part(held: StoredTensor) -> Tensor:
    return held.local if held.memory is None else held.memory


def _is_here(held: StoredTensor) -> bool:
    """Whether the tensor is stored on this rank's pipeline stage."""
    return not isinstance(held.home, StageTransfers) or held.home.member


def other_change(found: Difference, first: tuple[int, str], second: tuple[int, str]) -> str:
    """Message for ranks of which one has changed a tensor that the other has not."""
    if not found.name:
        return f"ranks {first[0]} and {second[0]} have not changed the same parameters or state between calls{replicas.CHANGED_ALONE}"
    (where, done), (other, _) = (second, first) if first[1] == NOT_THERE else (first, second)
    if done == EXCHANGED:
        return (
            f"rank {where} exchanges parts of {found.name} with rank {other}, which does something else\n"
            "  why: the tensor is a compiled model's, of which each rank has a part: to read it, or a view of it, and to edit one, torch\n"
            "  gathers it from all of them\n"
            "  what to do: make that call on every rank (take it out of `if rank == 0`), and print or write what it gives on one"
        )
    if done == SEEN:
        return (
            f"rank {where} brings what it sees of {found.name} up to date, and rank {other} does not\n"
            "  why: it is stored in no layout of torch's, so what you see is a copy, which ranks make together\n"
            "  what to do: call state_dict, load_state_dict and program.sync on every rank, without `if rank == 0`"
        )
    return f"{replicas.change_text([found.name], found.more, where, other)}{replicas.CHANGED_ALONE}"


def other_run(found: Difference, first: tuple[int, str], second: tuple[int, str]) -> str:
    """Message for ranks that run different programs, or have stepped optimizers different numbers of times."""
    ranks = f"ranks {first[0]} and {second[0]}"
    if found.name == STEPS:
        return (
            f"{ranks} have not stepped their optimizers alike: steps between two calls are {first[1]} on rank {first[0]} and {second[1]} "
            f"on rank {second[0]}\n"
            "  why: each rank steps its own part or replica of the parameters, which from then on are no model's\n"
            "  what to do: call optimizer.step() on every rank, or on none (a loss that is not finite, a norm that is too large: decide by "
            "what\n  is the same on all ranks). Go on from a state that was saved before that step"
        )
    calls = f": rank {first[0]} runs {first[1]} where rank {second[0]} runs {second[1]}" if found.name == PROGRAM else ""
    return (
        f"{ranks} call programs in another order{calls}\n"
        "  why: what ranks of one program send each other meets what is of another one, and is taken for it\n"
        "  what to do: compile models, and call them, in one order on every rank: out of a list, not a set, and without `if rank == 0`"
    )
