"""Activations in flight on a rank: microbatches, or their bytes, between forward and the backward that frees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshc.pipelining.schedule import Action


def activations_in_flight(actions: Sequence[Action], stage_bytes: Sequence[float] | None = None) -> Iterator[float]:
    """Yields the activations in flight while each action of one rank runs: a count of (stage, microbatch) pairs, or their bytes.

    A forward allocates the activations that its stage saves for one microbatch; B, or W where backward is split, frees them. A forward
    without a backward saves nothing.

    stage_bytes  bytes that each stage saves for one microbatch; every stage counts as 1 if not given
    """
    freed = {(action.stage, action.microbatch) for action in actions if action.op in "BW"}
    now = 0.0 if stage_bytes is not None else 0
    for action in actions:
        amount = 1 if stage_bytes is None else stage_bytes[action.stage]
        if action.op == "F" and (action.stage, action.microbatch) in freed:
            now += amount
        yield now
        if action.op in "BW":
            now -= amount


def peaks(lists: Iterable[Sequence[Action]], stage_bytes: Sequence[float] | None = None) -> tuple[float, ...]:
    """Each rank's peak of `activations_in_flight`."""
    return tuple(max(activations_in_flight(actions, stage_bytes), default=0) for actions in lists)
