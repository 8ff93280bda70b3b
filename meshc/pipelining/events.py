"""Timeline events beside a schedule's instructions: stages and transfers that run once a call, and work on the host.

    RUN:main.0  OUT:main.to_host_1  HOST:main.adam_many_  IN:main.from_host_3        a copy to the host, an operator there, a copy back
    RUN:before_0.0  RECV:parameter:table.weight@0>1  F0.0 ... B0.3  SEND:sum:gradient@1>0  RUN:after_0.0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from meshc.pipelining.schedule import Instruction, parse_instruction


@dataclass(frozen=True, slots=True, order=True)
class StageRun:
    """A stage outside a schedule: before the first microbatch, after the last, or of a program without pipeline stages."""

    stage: str
    microbatch: int = 0

    def __str__(self) -> str:
        return f"RUN:{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True, order=True)
class CallTransfer:
    """A transfer between two ranks of the pipeline axis once a call; `op` is SEND or RECV."""

    op: str
    key: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.op}:{self.key}@{self.source}>{self.target}"


@dataclass(frozen=True, slots=True, order=True)
class HostEvent:
    """Host work of a rank within a stage; `op` is OUT (a copy to the host), IN (a copy from the host) or HOST (an operator that runs on
    the host), `name` is `stage.node`."""

    op: str
    name: str

    def __str__(self) -> str:
        return f"{self.op}:{self.name}"


THERE: Final = {"OUT": "to the host", "HOST": "on the host", "IN": "from the host"}
"""Names of the host's lanes in a trace, in the order of the lanes."""

Item: TypeAlias = Instruction | StageRun | CallTransfer | HostEvent
"""The instruction of a timeline event."""

_RUN: Final = re.compile(r"RUN:(\w+)\.(\d{1,9})", re.ASCII)
_THERE: Final = re.compile(r"(OUT|IN|HOST):([\w.]+)", re.ASCII)
_HANDED: Final = re.compile(r"(SEND|RECV):(.+)@(\d{1,9})>(\d{1,9})", re.ASCII)


def parse_item(text: str) -> Item:
    """Parses one item, as `str` prints it. Raises ScheduleError for any other text."""
    if run := _RUN.fullmatch(text):
        return StageRun(run[1], int(run[2]))
    if there := _THERE.fullmatch(text):
        return HostEvent(there[1], there[2])
    if handed := _HANDED.fullmatch(text):
        return CallTransfer(handed[1], handed[2], int(handed[3]), int(handed[4]))
    return parse_instruction(text)
