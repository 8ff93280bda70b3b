"""Pipeline schedules: for each rank of the pipeline axis, the ordered list of actions, sends and receives, as data and as text.

    0: F0.0 SEND:F0.0>1 F0.1 SEND:F0.1>1 RECV:B1.0>0 RECV:B1.1>0 B0.0 B0.1
    1: RECV:F0.0>1 F1.0 ...

``F0.1`` is the forward of stage 0 on microbatch 1; ``B`` a whole backward; ``I`` the half that computes the gradient of the stage's
inputs, ``W`` the half that computes the gradients of its weights. ``F0.1>1`` is the message from ``F0.1`` to stage 1.

``SEND`` and ``RECV`` post a transfer and do not wait. The first action that needs a message waits until it has arrived. Each ordered pair
of ranks is a channel of its own, in which the k-th ``RECV`` receives the message of the k-th ``SEND``.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, TypeAlias

from meshc.errors import ScheduleError
from meshc.ir.bounds import MOST_ACTIONS, MOST_STAGES

OPS: Final = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage's work on one microbatch; ``op`` is a key of `OPS`."""

    op: str
    stage: int
    microbatch: int

    @property
    def direction(self) -> str:
        """The kind of result that other stages read: an activation, ``F``, or a gradient, ``B``. No other stage reads that of ``W``."""
        return "B" if self.op == "I" else self.op

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """The result of action ``of`` that stage ``to`` reads."""

    of: Action
    to: int

    @property
    def link(self) -> StageLink:
        return StageLink(self.of.direction, self.of.stage, self.to)

    @property
    def users(self) -> tuple[Action, ...]:
        """The actions that may read the message; a rank has one of them."""
        return tuple(Action(op, self.to, self.of.microbatch) for op in ("F" if self.of.op == "F" else "IB"))

    def __str__(self) -> str:
        return f"{self.of}>{self.to}"


@dataclass(frozen=True, slots=True)
class Send:
    message: Message

    def __str__(self) -> str:
        return f"SEND:{self.message}"


@dataclass(frozen=True, slots=True)
class Recv:
    message: Message

    def __str__(self) -> str:
        return f"RECV:{self.message}"


Instruction: TypeAlias = Action | Send | Recv


@dataclass(frozen=True, slots=True, order=True)
class StageLink:
    """A dependence, in every microbatch, of stage ``target`` on ``source``: activations (``op`` F) or gradients (``op`` B)."""

    op: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.op}{self.source}>{self.target}"


@dataclass(frozen=True)
class Schedule:
    """The instructions of each rank of the pipeline axis.

    lists  one for each rank
    name   display name; not compared, not printed
    lines  the line of the text that each rank's list was read from; empty if it was not read
    """

    lists: tuple[tuple[Instruction, ...], ...]
    name: str = field(default="", compare=False)
    lines: tuple[int, ...] = field(default=(), compare=False)

    @property
    def ranks(self) -> int:
        return len(self.lists)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Each rank's list without its messages."""
        return tuple(tuple(item for item in items if isinstance(item, Action)) for items in self.lists)

    @cached_property
    def stages(self) -> int:
        """Number of stages: the highest stage in the lists plus one."""
        return 1 + max((action.stage for action in itertools.chain(*self.actions)), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches: the highest microbatch in the lists plus one."""
        return 1 + max((action.microbatch for action in itertools.chain(*self.actions)), default=-1)

    @cached_property
    def trains(self) -> bool:
        """Whether the schedule has a backward."""
        return any(action.op != "F" for action in itertools.chain(*self.actions))

    @cached_property
    def _ranks(self) -> Mapping[int, int]:
        ranks: dict[int, int] = {}
        for rank, actions in enumerate(self.actions):
            for action in actions:
                ranks.setdefault(action.stage, rank)
        return ranks

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage; the first one in a schedule that `check` refuses for having two. Raises KeyError for none."""
        return self._ranks[stage]

    def __str__(self) -> str:
        return "\n".join(" ".join([f"{rank}:", *map(str, items)]) for rank, items in enumerate(self.lists))


# Messages.


def chain(stages: int) -> frozenset[StageLink]:
    """The links of a plain chain: each stage sends activations to the next stage, and gradients to the one before."""
    pairs = list(itertools.pairwise(range(stages)))
    return frozenset([StageLink("F", a, b) for a, b in pairs] + [StageLink("B", b, a) for a, b in pairs])


def connect(lists: Iterable[Sequence[Action]], links: Collection[StageLink], name: str = "") -> Schedule:
    """The schedule of these actions with the messages of `links`; nothing is sent between stages of one rank.

    A SEND directly follows the action that computes the message. A RECV comes before the action that precedes its user, so that the
    transfer overlaps that action; earlier where its channel's order requires. Links whose actions are missing are left to `check`.
    """
    lists = [tuple(actions) for actions in lists]
    place = {action: (rank, position) for rank, actions in enumerate(lists) for position, action in enumerate(actions)}
    after: dict[Action, list[Message]] = defaultdict(list)
    channels: dict[tuple[int, int], list[tuple[Message, int]]] = defaultdict(list)
    outgoing: dict[tuple[str, int], list[StageLink]] = defaultdict(list)
    for link in sorted(links):
        outgoing[link.op, link.source].append(link)
    for rank, actions in enumerate(lists):
        for action in actions:
            for link in outgoing[action.direction, action.stage]:
                message = Message(action, link.target)
                target, position = next((place[user] for user in message.users if user in place), (rank, 0))
                if target != rank:
                    after[action].append(message)
                    channels[rank, target].append((message, position))
    before = _receives_by_place(channels)
    connected = []
    for rank, actions in enumerate(lists):
        items: list[Instruction] = []
        for position, action in enumerate(actions):
            items += [*map(Recv, before[rank, position]), action, *map(Send, after[action])]
        connected.append(tuple(items))
    return Schedule(tuple(connected), name)


def _receives_by_place(channels: Mapping[tuple[int, int], list[tuple[Message, int]]]) -> Mapping[tuple[int, int], list[Message]]:
    """(rank, position) -> messages received before that action: each no later than the messages that follow it in its channel."""
    found: dict[tuple[int, int], list[tuple[int, int, int, Message]]] = defaultdict(list)
    for (source, target), sent in channels.items():
        needed = sent[-1][1]
        for order, (message, position) in reversed(list(enumerate(sent))):
            needed = min(needed, position)
            found[target, max(needed - 1, 0)].append((needed, source, order, message))
    return defaultdict(list, {place: [message for *_, message in sorted(posts)] for place, posts in found.items()})


# Reading.

_RANK: Final = re.compile(r"\s*(\d{1,9})\s*:", re.ASCII)
_TOKEN: Final = re.compile(r"(?:(SEND|RECV):)?([FBIW])(\d{1,9})\.(\d{1,9})(?:>(\d{1,9}))?", re.ASCII)
_WIDTH: Final = 100
"""Columns of a long line that an error shows."""


class _Fault(Exception):
    def __init__(self, column: int, fix: str) -> None:
        self.column = column
        self.fix = fix


def parse(text: str, links: Collection[StageLink] | None = None, name: str = "") -> Schedule:
    """Reads the text of `str(schedule)`, with blank lines and comments (``#``). Raises ScheduleError that lists every line at fault.

    A text with actions alone gets its messages from `connect`, for ``links`` (a plain chain if not given). A text with any message must
    have all of them, which `check` verifies.
    """
    found: dict[int, tuple[int, list[Instruction]]] = {}
    faults = []
    if (length := text.count(".")) > MOST_ACTIONS:
        raise ScheduleError(f"{name or 'the schedule'} has {length} actions and messages; at most {MOST_ACTIONS} are read")
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].expandtabs().rstrip()
        if not line:
            continue
        try:
            rank, items = _read_line(line)
            if rank in found:
                raise _Fault(0, f"rank {rank} has a list in line {found[rank][0]}: join the two")
            found[rank] = number, items
        except _Fault as fault:
            faults.append(_fault_text(number, line, fault))
    if not faults and sorted(found) != list(range(len(found))):
        absent = (str(rank) for rank in range(max(found)) if rank not in found)
        missing = ", ".join(itertools.islice(absent, 8))
        faults.append(f"ranks count from 0 without gaps: give rank {missing} a line, which may be empty after its colon")
    if not found and not faults:
        faults.append("it has no line: write one for each rank, as in `0: F0.0 F0.1 B0.0 B0.1`")
    if faults:
        raise ScheduleError("\n".join([f"{name or 'the schedule'} cannot be read:", *faults]).replace("\n", "\n  "))
    lists = [found[rank][1] for rank in range(len(found))]
    schedule = Schedule(tuple(map(tuple, lists)), name)
    if all(isinstance(item, Action) for item in itertools.chain(*lists)):
        schedule = connect(schedule.actions, chain(schedule.stages) if links is None else links, name)
    return replace(schedule, lines=tuple(found[rank][0] for rank in range(len(found))))


def parse_instruction(text: str) -> Instruction:
    """Parses one instruction, as `str` prints it. Raises ScheduleError for any other text."""
    try:
        return _read_token(text, 0)
    except _Fault as fault:
        raise ScheduleError(f"{text!r} is no instruction: {fault.fix}") from None


def _read_line(line: str) -> tuple[int, list[Instruction]]:
    head = _RANK.match(line)
    if head is None:
        raise _Fault(len(line) - len(line.lstrip()), "a line starts with its rank and a colon, as in `0: F0.0 F0.1 B0.0 B0.1`")
    return int(head[1]), [_read_token(token[0], head.end() + token.start()) for token in re.finditer(r"\S+", line[head.end() :])]


def _read_token(token: str, column: int) -> Instruction:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise _Fault(column, "write F, B, I or W with stage and microbatch, as in `F0.1`; or a message, as in `SEND:F0.1>1`")
    post, op, stage, microbatch, to = match.groups()
    action = Action(op, int(stage), int(microbatch))
    if max(action.stage, int(to or 0)) >= MOST_STAGES:
        raise _Fault(column, f"stages are numbered from 0, and there are at most {MOST_STAGES}")
    if post is None and to is None:
        return action
    if to is None:
        other = action.stage - 1 if op != "F" and action.stage else action.stage + 1
        raise _Fault(column, f"say which stage it is for, as in `{token}>{other}`")
    if post is None:
        raise _Fault(column, f"`{token}` is a message: post it with `SEND:{token}`, or with `RECV:{token}` where it arrives")
    if op == "W":
        raise _Fault(column, "gradients of weights stay where they are; a B or an I makes what is sent")
    if int(to) == action.stage:
        raise _Fault(column, f"stage {to} has it already: drop the message")
    return (Send if post == "SEND" else Recv)(Message(action, int(to)))


def _fault_text(number: int, line: str, fault: _Fault) -> str:
    """The line, or its part around the fault, with a caret below."""
    start = max(0, fault.column - _WIDTH // 2) if len(line) > _WIDTH else 0
    part = line[start : start + _WIDTH]
    head = f"line {number}: " + ("... " if start else "")
    tail = " ..." if start + _WIDTH < len(line) else ""
    return f"{head}{part}{tail}\n{' ' * (len(head) + fault.column - start)}^ {fault.fix}"
