"""Validation of a pipeline schedule before it runs: missing actions, unmatched messages, deadlocks, exceeded memory budgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from meshc.errors import ScheduleError, lines_of
from meshc.pipelining.activations import activations_in_flight
from meshc.pipelining.player import Player
from meshc.pipelining.schedule import Action, Instruction, Message, Recv, Schedule, Send, StageLink

_SHOWN = 20
"""How many faults one error lists."""


def check(
    schedule: Schedule,
    links: Collection[StageLink],
    stage_bytes: Sequence[float] | None = None,
    budget: float | Sequence[float] | None = None,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    trains: bool | None = None,
) -> None:
    """Raises ScheduleError with every fault found: the instruction, its rank, its position in the rank's list, counted from 0, and its
    line if the schedule was read from text.

    links         the links between stages
    stage_bytes   bytes that each stage saves for one microbatch between forward and backward
    budget        bytes of saved activations allowed, for all ranks or one by one; not checked if `budget` or `stage_bytes` is missing
    stages, microbatches  the expected numbers; those of the schedule if not given
    trains        whether backwards are expected; if not given, whether the schedule has any
    """
    listing = _Listing(schedule)
    stages = max([1, schedule.stages, *(1 + max(link.source, link.target) for link in links)]) if stages is None else stages
    microbatches = max(1, schedule.microbatches) if microbatches is None else microbatches
    faults = [
        *_duplicate_instructions(listing),
        *_misplaced_actions(listing, stages, microbatches),
        *_missing_actions(listing, stages, microbatches, schedule.trains if trains is None else trains),
        *_order_faults(listing, links),
    ]
    # Messages follow from actions, channels from messages, deadlocks from all of it: a fault would be reported again in each of these.
    faults = faults or [*_message_faults(listing, links)]
    faults = faults or [*_channel_faults(listing)]
    faults = faults or [*_deadlock(listing)]
    if not faults and stage_bytes is not None and budget is not None:
        faults += _memory(listing, stage_bytes, budget)
    if faults:
        raise ScheduleError(f"{schedule.name or 'the schedule'} cannot run:\n  {lines_of(faults, _SHOWN, 2)}")


class _Listing:
    """Positions of all instructions: `place` is the first (rank, position) of an instruction that is listed twice."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.places: dict[Instruction, list[tuple[int, int]]] = defaultdict(list)
        for rank, items in enumerate(schedule.lists):
            for position, item in enumerate(items):
                self.places[item].append((rank, position))

    def has(self, item: Instruction) -> bool:
        return item in self.places

    def place(self, item: Instruction) -> tuple[int, int]:
        return self.places[item][0]

    def place_text(self, rank: int, position: int) -> str:
        line = f" (line {self.schedule.lines[rank]})" if self.schedule.lines else ""
        return f"rank {rank}, position {position}, {self.schedule.lists[rank][position]}{line}"

    def owner(self, stage: int) -> int | None:
        try:
            return self.schedule.rank_of(stage)
        except KeyError:
            return None

    def actions(self) -> Iterator[Action]:
        return (item for item in self.places if isinstance(item, Action))

    def of(self, ops: str, stage: int, microbatch: int) -> Action | None:
        """The action of this stage and microbatch that is one of ``ops``."""
        return next((action for op in ops if self.has(action := Action(op, stage, microbatch))), None)


def _duplicate_instructions(listing: _Listing) -> Iterator[str]:
    for first, *others in listing.places.values():
        for place in others:
            yield f"{listing.place_text(*place)}: is there already, at rank {first[0]}, position {first[1]}; keep one"


def _misplaced_actions(listing: _Listing, stages: int, microbatches: int) -> Iterator[str]:
    """Actions on the wrong rank, of stages or microbatches that do not exist, or half backwards beside a whole one."""
    for action in listing.actions():
        rank, position = listing.place(action)
        owner = listing.schedule.rank_of(action.stage)
        if rank != owner:
            yield (
                f"{listing.place_text(rank, position)}: stage {action.stage} is rank {owner}'s; "
                "move it there, or the stage's other actions here"
            )
        if action.stage >= stages:
            yield f"{listing.place_text(rank, position)}: there are {stages} stages, 0 to {stages - 1}; drop it"
        if action.microbatch >= microbatches:
            yield f"{listing.place_text(rank, position)}: there are {microbatches} microbatches, 0 to {microbatches - 1}; drop it"
        if action.op in "IW" and listing.of("B", action.stage, action.microbatch):
            whole = Action("B", action.stage, action.microbatch)
            yield f"{listing.place_text(rank, position)}: {whole} is the whole backward; keep {whole}, or I and W"


def _missing_actions(listing: _Listing, stages: int, microbatches: int, trains: bool) -> Iterator[str]:
    for stage in range(stages):
        owner = listing.owner(stage)
        if owner is None:
            yield f"stage {stage} is run by no rank: give it to one, as in `F{stage}.0`"
            continue
        for microbatch in range(microbatches):
            which = f"of stage {stage} on microbatch {microbatch}"
            forward, whole, inputs, weights = (listing.of(op, stage, microbatch) for op in "FBIW")
            if not forward:
                yield f"rank {owner}: F{stage}.{microbatch} is missing, the forward {which}; add it"
            if trains and not (whole or inputs or weights):
                yield f"rank {owner}: B{stage}.{microbatch} is missing, the backward {which}; add it, or I and W"
            if not trains and (backward := whole or inputs or weights):
                yield f"{listing.place_text(*listing.place(backward))}: nothing is trained, so there are no backwards; drop it"
            if inputs and not (whole or weights):
                place = listing.place_text(*listing.place(inputs))
                yield f"rank {owner}: W{stage}.{microbatch} is missing, the other half of {place}; add it after that, or make that a B"
            if weights and not (whole or inputs):
                place = listing.place_text(*listing.place(weights))
                yield f"rank {owner}: I{stage}.{microbatch} is missing, which {place} needs; add it before that, or make that a B"


def _order_faults(listing: _Listing, links: Collection[StageLink]) -> Iterator[str]:
    """Actions listed before another action of their rank that they depend on."""
    sources: dict[tuple[str, int], list[int]] = defaultdict(list)
    for link in sorted(links):
        sources[link.op, link.target].append(link.source)
    for action in listing.actions():
        rank, position = listing.place(action)
        local = {"F": "", "B": "F", "I": "F", "W": "I"}[action.op]
        needs = [listing.of(local, action.stage, action.microbatch)]
        for source in sources[action.direction, action.stage] if action.op != "W" else ():
            needs.append(listing.of("F" if action.op == "F" else "IB", source, action.microbatch))
        for need in needs:
            there, after = listing.place(need) if need is not None else (rank, position)
            if there == rank and after > position:
                yield f"{listing.place_text(rank, position)}: needs {need}, which comes after it, at position {after}; put {need} first"


def _message_faults(listing: _Listing, links: Collection[StageLink]) -> Iterator[str]:
    """Messages that are missing, unexpected, or on the wrong side of their action."""
    schedule = listing.schedule
    expected: dict[Message, tuple[Action, Action]] = {}
    for link in sorted(links):
        for microbatch in range(schedule.microbatches):
            made = listing.of("F" if link.op == "F" else "IB", link.source, microbatch)
            user = listing.of("F" if link.op == "F" else "IB", link.target, microbatch)
            if made and user and listing.place(made)[0] != listing.place(user)[0]:
                expected[Message(made, link.target)] = made, user
    for message, (made, user) in expected.items():
        send, receive = Send(message), Recv(message)
        (source, after), (target, before) = listing.place(made), listing.place(user)
        if not listing.has(send):
            awaits = f", for which {listing.place_text(*listing.place(receive))} waits" if listing.has(receive) else f", which {user} needs"
            yield f"rank {source}: {send} is missing{awaits}; put it after {listing.place_text(source, after)}"
        if not listing.has(receive):
            yield f"rank {target}: {receive} is missing, which {listing.place_text(target, before)} needs; put it before that"
        if listing.has(send) and listing.place(send)[0] == source and listing.place(send)[1] < after:
            yield f"{listing.place_text(*listing.place(send))}: stands before {made} (position {after}), which makes it; put it after that"
        if listing.has(receive) and listing.place(receive)[0] == target and listing.place(receive)[1] > before:
            yield (
                f"{listing.place_text(*listing.place(receive))}: stands after {user} (position {before}), "
                "which needs it; put it before that"
            )
    for item in list(listing.places):
        if isinstance(item, (Send, Recv)) and (why := _stray_message_reason(listing, item, expected, links)):
            yield f"{listing.place_text(*listing.place(item))}: {why}"


def _stray_message_reason(
    listing: _Listing, item: Send | Recv, expected: dict[Message, tuple[Action, Action]], links: Collection[StageLink]
) -> str | None:
    """The reason why a send or receive is on the wrong rank, or on none; None for an expected one."""
    message = item.message
    rank, _ = listing.place(item)
    if message in expected:
        right = listing.place(expected[message][0 if isinstance(item, Send) else 1])[0]
        verb = "makes" if isinstance(item, Send) else "needs"
        return None if rank == right else f"rank {right} {verb} it; move it there"
    if not listing.has(message.of):
        other = listing.of("IB" if message.of.op in "IB" else "", message.of.stage, message.of.microbatch)
        return f"nothing makes it: {message.of} is in no list; " + (f"{other} makes what is sent" if other else "drop it")
    user = next((user for user in message.users if listing.has(user)), None)
    if user is None:
        return f"nothing needs it: {' or '.join(map(str, message.users))} is in no list; drop it"
    if message.link not in links:
        return f"stage {message.of.stage} has nothing for stage {message.to}; drop it"
    return f"rank {listing.place(user)[0]} has both stages and sends itself nothing; drop it"


def _channel_faults(listing: _Listing) -> Iterator[str]:
    """Channels whose receives are in another order than the sends; a channel is an ordered pair of ranks."""
    schedule = listing.schedule
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    awaited: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, items in enumerate(schedule.lists):
        for item in items:
            if isinstance(item, Send):
                sent[rank, schedule.rank_of(item.message.to)].append(item.message)
            elif isinstance(item, Recv):
                awaited[schedule.rank_of(item.message.of.stage), rank].append(item.message)
    for (source, target), messages in sorted(sent.items()):
        for given, taken in zip(messages, awaited[source, target], strict=True):
            if given != taken:
                place, send = (listing.place_text(*listing.place(item)) for item in (Recv(taken), Send(given)))
                yield f"{place}: at its turn comes {given}, which {send} gives; receive in the order of sending"
                break


def _deadlock(listing: _Listing) -> Iterator[str]:
    waits = wait_cycle(listing.schedule)
    if waits:
        lines = [
            f"{listing.place_text(*wait.place)} waits for {wait.needs}, which comes from {listing.place_text(*wait.made)}" for wait in waits
        ]
        fix = "each waits for what another has behind the place where it waits itself; move one of these to before its rank's wait"
        yield "\n    ".join(["ranks wait for each other:", *lines, fix])


def _memory(listing: _Listing, stage_bytes: Sequence[float], budget: float | Sequence[float]) -> Iterator[str]:
    for rank, actions in enumerate(listing.schedule.actions):
        allowed = budget[rank] if isinstance(budget, Sequence) else budget
        counts = list(activations_in_flight(actions))
        for index, now in enumerate(activations_in_flight(actions, stage_bytes)):
            if now > allowed:
                place = listing.place_text(*listing.place(actions[index]))
                what = f"{counts[index]:,} activations in flight, {now:,.0f} bytes, where {allowed:,.0f} are allowed"
                yield f"{place}: {what}; use a schedule that holds fewer, or smaller microbatches"
                break


# Deadlock detection: the cycle of ranks that wait for each other, if there is one.


@dataclass(frozen=True, slots=True)
class Wait:
    """The action at `place` waits for the message `needs`, which the action at `made` computes; places are (rank, position)."""

    place: tuple[int, int]
    needs: Message
    made: tuple[int, int]


def wait_cycle(schedule: Schedule) -> list[Wait]:
    """A cycle of waits, each for an action behind the one at which the next rank waits; empty if all ranks finish.

    Assumes that each message is sent and received once, on the right ranks and sides of their actions, in the same order.
    """
    places = {item: (rank, at) for rank, items in enumerate(schedule.lists) for at, item in enumerate(items)}
    player = Player(schedule)
    stopped = player.stopped
    chain: list[Wait] = []
    seen: dict[int, int] = {}
    # A rank that has stopped waits for a message that was not sent, so the rank that sends it has stopped too.
    while stopped and stopped[0] not in seen:
        rank = stopped[0]
        message = player.awaited_message(rank)
        assert message is not None
        seen[rank] = len(chain)
        chain.append(Wait((rank, player.at[rank]), message, places[message.of]))
        stopped = [places[Send(message)][0]]
    return chain[seen[stopped[0]] :] if stopped else []
