"""Process group of a program: its groups, the agreement of ranks, and errors that reach all ranks; one thread at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshc.errors import StateError
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.program.program import PlainProgram
from meshc.runtime.agreement import descriptions
from meshc.runtime.agreement.compare import agree, from_rank_0, refusable, together
from meshc.runtime.comm.groups import Groups
from meshc.runtime.failure.failed_rank import FailureBoard
from meshc.runtime.failure.thread_turn import ThreadTurn
from meshc.text import printer

Context = contextlib.AbstractContextManager[Any]


class World:
    """Process group of one program; without one, its contexts admit one thread at a time, or do nothing.

    board   where ranks report failures; None without a process group
    warned  what users have been warned of, at whatever size: Python's own registry forgets it where tracing enters other filters
    """

    def __init__(self, mesh: Mesh, board: FailureBoard | None) -> None:
        self.mesh, self.board = mesh, board
        self.warned: set[str] = set()
        self._turn = ThreadTurn()
        self._groups: Groups | None = None
        self._under = dist.group.WORLD if dist.is_available() else None
        self._number = 0 if board is None or mesh.device_mesh is None else board.numbers.count_program()
        if mesh.device_mesh is not None and mesh.world_size != (world := dist.get_world_size()):
            raise StateError(
                f"the mesh {mesh} has {mesh.world_size} ranks, but {world} were started\n"
                f"  what to do: start {mesh.world_size} (torchrun --nproc-per-node), or give the mesh {world} ranks"
            )

    @property
    def has_ranks(self) -> bool:
        """Whether programs run here; a mesh without a process group is compiled for only."""
        return self.mesh.device_mesh is not None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.mesh.device_type == "cuda" else torch.device("cpu")

    @property
    def groups(self) -> Groups:
        """Groups, created at first use, which all ranks reach together: creation waits for all, and no failure interrupts it."""
        if self._groups is None:
            assert self.mesh.device_mesh is not None
            self._groups = Groups(axis_sizes(self.mesh), dist.get_rank(), dist.get_world_size(), self.mesh.device_mesh)
        return self._groups

    def move(self, mesh: Mesh) -> None:
        """Replaces the mesh by one with other axes over the same ranks."""
        self.mesh, self._groups = mesh, None

    def failure_guard(self, what: str, step: int = 0) -> Context:
        """A context for one thread, in which a failure on any rank is raised on all."""
        return self._turn.hold(what) if self.board is None else self.board.guard(step, what)

    def refusable(self) -> Context:
        """A context before any communication: an error raised in it is reported to the other ranks, which are not waiting yet."""
        return refusable(self.board)

    def together(self, what: str) -> Context:
        """A context that all ranks enter: an error of one rank is raised on all."""
        return together(self.board, what)

    def from_rank_0(self, work: Callable[[], Any]) -> Any:
        """The result of `work` on rank 0, on every rank; an error of rank 0 is raised on all."""
        return from_rank_0(self.board, work)

    def begin(self, name_of: Callable[[], str]) -> None:
        """Marks that this rank starts to communicate: a rank that refuses the call then sees that only it did. name_of: what is called."""
        if self.board is not None:
            what = name_of()
            self.board.begin(what, f"{what} (meshc.compile {self._number})")

    def agree(self, what: str, mine: dict[str, str], **how: Any) -> None:
        """Checks that `mine` is equal on all ranks. Raises the error that `error` in `how` builds of a difference."""
        if self.board is not None:
            agree(self.board, what, mine, **how)

    def agree_on_program(self, compiled: PlainProgram, module: nn.Module, read: Callable[[], Mapping[str, str]]) -> None:
        """Checks after a compilation that all ranks have the same program. read: the Python values that it depends on."""
        if self.board is not None:
            same = {descriptions.COMPILED: printer.hash_program(compiled)}
            self.agree("compile", same, advice=descriptions.advice, behind=partial(descriptions.possible_causes, compiled, module, read))

    def refuse_call(self) -> None:
        """Raises StateError where no program can run: without a process group, or under another than it was compiled for."""
        if not self.has_ranks:
            raise StateError(
                f'this program was compiled for meshc.Mesh("{self.mesh}") without a process group: look at it, verify it, save it.\n'
                "  what to do: save it and start `torchrun ... -m meshc run PATH`, or compile with a DeviceMesh under torchrun"
            )
        if dist.group.WORLD is not self._under:
            raise StateError(
                "the process group that this program was compiled under has been destroyed, and its groups with it\n"
                "  what to do: call it before torch.distributed.destroy_process_group(), or compile again under the new group"
            )
