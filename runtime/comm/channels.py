"""Channels between pipeline stages: asynchronous sends and receives, each waited for when its values are first needed.

    recv(flow:h@1)  posted      F1.0 runs      F1.1 reads flow:h@1: now its rank waits
    send(flow:h@1)  posted      F0.2 runs      a message comes that says that this one has arrived: its memory is free

Each ordered pair of ranks of the pipeline axis is a channel with a process group of its own, so that messages of forward never wait for
those of backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from meshc.ir import record
from meshc.ir.sharding import local_shape
from meshc.pipelining.pipeline_stages import slot
from meshc.program.accumulate import whole_of
from meshc.program.program import Instruction, PlainProgram
from meshc.program.rank_instructions import steps_of
from meshc.program.receipts import receipts
from meshc.runtime.comm import collectives
from meshc.runtime.comm.groups import Groups

Like = tuple[tuple[int, ...], torch.dtype]


class Channels:
    """The messages of one program on this rank, between its runs of stages."""

    def __init__(self, program: PlainProgram, groups: Groups, coordinates: Mapping[str, int], device: torch.device) -> None:
        pipeline = program.pipeline
        assert pipeline is not None
        self.device = device
        self.here = coordinates[pipeline.axis]
        self._groups: dict[tuple[int, int], ProcessGroup] = groups.pairs(pipeline.axis, pipeline.pairs())
        self._like = _likes(program)
        self._coming: dict[
            str, tuple[collectives.CollectiveWork, int, int]
        ] = {}  # with the rank that sends, and which of its messages it is
        self._leaving: dict[int, list[list[collectives.CollectiveWork]]] = {}  # messages of this call to a rank, those that are over empty
        self._posted: dict[int, int] = {}
        peers = {source for source, target in pipeline.pairs() if target == self.here}
        self._receipts = {
            peer: receipts(steps_of(program, {**coordinates, pipeline.axis: peer}), program.stages, self.here) for peer in sorted(peers)
        }

    def groups(self) -> list[ProcessGroup]:
        return list(self._groups.values())

    def send(self, step: Instruction, env: Mapping[str, torch.Tensor]) -> None:
        """Posts the values of a message."""
        group = self._groups[self.here, step.peer]
        values = [env[slot(key, step.microbatch)] for key in step.keys]
        self._leaving.setdefault(step.peer, []).append(collectives.send_all(values, group, _other(group)))

    def receive(self, step: Instruction) -> None:
        """Posts the receives of a message."""
        group = self._groups[step.peer, self.here]
        into = [torch.empty(self._like[key][0], dtype=self._like[key][1], device=self.device) for key in step.keys]
        slots = [slot(key, step.microbatch) for key in step.keys]
        number = self._posted.get(step.peer, 0)
        self._posted[step.peer] = number + 1
        works = collectives.receive_all(into, group, _other(group))
        self._coming |= {name: (one, step.peer, number) for name, one in zip(slots, works, strict=True)}

    def wait_for_values(self, slots: Sequence[str], env: dict[str, torch.Tensor]) -> list[str]:
        """Waits for the values among `slots` that are in flight, and puts them into `env`. Returns their slots."""
        late = [name for name in slots if name in self._coming]
        for name in late:
            work, peer, number = self._coming.pop(name)
            env[name] = work.wait()
            for sent in self._leaving.get(peer, [])[: self._receipts[peer][number]]:
                _wait(sent)
        return late

    def finish(self, env: dict[str, torch.Tensor]) -> None:
        """Waits for the values that no stage of this rank reads: those that leave the program here."""
        self.wait_for_values(list(self._coming), env)

    def settle(self) -> None:
        """Waits until all posted sends are over: from then on their memory may be written."""
        for messages in self._leaving.values():
            for sent in messages:
                _wait(sent)

    def begin(self) -> None:
        """Called before a call of the program: waits for the sends of the call before, and resets."""
        self.settle()
        self._leaving, self._posted = {}, {}


def _wait(sent: list[collectives.CollectiveWork]) -> None:
    """Waits for the sends of a message, and releases their tensors."""
    for work in sent:
        work.wait()
    sent.clear()


def _other(group: ProcessGroup) -> int:
    return 1 - group.rank()


def _likes(program: PlainProgram) -> dict[str, Like]:
    """Key -> local shape and dtype, for all values that a message may carry."""
    found: dict[str, Like] = {}
    for port in program.inputs:
        shape = port.shape if port.sharding is None else local_shape(port.sharding, program.axis_sizes)
        found[port.key] = (shape, port.dtype)
    for stage in program.stages.values():
        for key, node in stage.results().items():
            made = record(node)
            if made.dtype is not None:
                whole = whole_of(key)
                found.setdefault(key if whole is None else whole[1], (made.shape, made.dtype))
    return found
