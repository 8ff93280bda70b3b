"""Faster pipeline schedule under given costs: as drawn, or with weight gradients moved into gaps, within the drawn one's memory.

No action waits for a gradient of weights, so its place is free between the gradient of inputs before it and the forward that needs its
memory. A schedule is written for stages of equal times and for enough microbatches. Under other costs, or with fewer, its forwards and
gradients of inputs stay in the written order, and each rank begins a gradient of weights when it would wait otherwise.
ZB-V on two ranks with two microbatches, as drawn, and filled:

    0  F0 F1    f0 i0 w0 f1 i1 w1 I0 W0    I1 W1
    1     F0 f0 F1 f1 i0 w0 I0 W0 i1 w1 I1 W1

    0  F0 F1    f0 i0 w0 f1 i1 I0 w1 I1 W0 W1
    1     F0 f0 F1 f1 i0 I0 w0 i1 I1 W0 w1 W1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from meshc.pipelining.activations import peaks
from meshc.pipelining.schedule import Action, Message, chain, connect
from meshc.pipelining.timing import Costs, ScheduleReplay


def fastest(drawn: Sequence[Sequence[Action]], costs: Costs) -> Sequence[Sequence[Action]]:
    """The drawn schedule of a chain of stages, or one that is faster under the costs and needs no more memory; ties keep the drawn one."""
    stages = 1 + max(action.stage for actions in drawn for action in actions)
    made = (drawn, _GapFiller(drawn, costs).lists())
    return min(made, key=lambda lists: round(ScheduleReplay(connect(lists, chain(stages))).makespan_s(costs), 12))


class _GapFiller:
    def __init__(self, drawn: Sequence[Sequence[Action]], costs: Costs) -> None:
        self.costs = costs
        self.limits = peaks(drawn)
        self.rank = {action.stage: rank for rank, actions in enumerate(drawn) for action in actions}
        self.left = [deque(action for action in actions if action.op != "W") for actions in drawn]
        self.weights: list[deque[Action]] = [deque() for _ in drawn]
        self.made: list[list[Action]] = [[] for _ in drawn]
        self.clock = [0.0] * len(drawn)
        self.held = [0] * len(drawn)
        self.end: dict[tuple[str, int, int], float] = {}

    def lists(self) -> list[list[Action]]:
        turns = {rank: self._turn(rank) for rank in range(len(self.made))}
        while any(self.left) or any(self.weights):
            # The earliest start of all: nothing that begins later can bring it forward.
            start, rank, action = min((turn[0], rank, turn[1]) for rank, turn in turns.items() if turn is not None)
            (self.weights if action.op == "W" else self.left)[rank].popleft()
            self.made[rank].append(action)
            self.clock[rank] = start + self.costs.of(action)
            self.end[action.direction, action.stage, action.microbatch] = self.clock[rank]
            self.held[rank] += {"F": 1, "I": 0, "B": -1, "W": -1}[action.op]
            if action.op == "I":
                self.weights[rank].append(Action("W", action.stage, action.microbatch))
            # Other ranks' turns are as they were, but for one that may have waited for this.
            follower = self.rank.get(action.stage + (1 if action.op == "F" else -1), rank)
            turns |= {changed: self._turn(changed) for changed in {rank, follower}}
        return self.made

    def _turn(self, rank: int) -> tuple[float, Action] | None:
        """(start, action) of a rank's next action; None if no action has a known start."""
        now = self.clock[rank]
        weights = self.weights[rank][0] if self.weights[rank] else None
        following = self.left[rank][0] if self.left[rank] else None
        full = following is not None and following.op == "F" and self.held[rank] >= self.limits[rank]
        ready_s = None if following is None or full else self._ready_s(following)
        if following is not None and ready_s is not None:
            if weights is None or ready_s <= now:
                return max(now, ready_s), following
        return None if weights is None else (now, weights)

    def _ready_s(self, action: Action) -> float | None:
        """When the operands of an action have arrived; None if an action that it needs has not been run."""
        before = Action(action.direction, action.stage + (-1 if action.op == "F" else 1), action.microbatch)
        times = [0.0]
        if before.stage in self.rank:
            end = self.end.get((before.op, before.stage, before.microbatch))
            if end is None:
                return None
            sent = self.rank[before.stage] != self.rank[action.stage]
            times.append(end + (self.costs.of(Message(before, action.stage)) if sent else 0.0))
        if action.op != "F":
            times.append(self.end["F", action.stage, action.microbatch])
        return max(times)
