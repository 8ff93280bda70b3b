"""Receipts: the sends of a rank that a message in the other direction proves to have arrived.

    rank 0:  SEND:F0.0>1   SEND:F0.1>1   ...   RECV:B1.0>0         B1.0 stands behind F1.0, which has waited for F0.0>1:
    rank 1:  F1.0          B1.0          SEND:B1.0>0               so where B1.0>0 has come, F0.0>1 has arrived, and its memory is free

A backend may be unable to test a send for completion without waiting for it (gloo is).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshc.pipelining.pipeline_stages import slot
from meshc.program.program import Instruction, Stage


def receipts(steps: Sequence[Instruction], stages: Mapping[str, Stage], rank: int) -> list[int]:
    """For each message that another rank's `steps` send to `rank`, in order: the number of messages from `rank` waited for by then."""
    used: list[int] = []  # for each message from `rank`, where the other rank first reads it
    coming: dict[str, int] = {}
    found: list[int] = []
    for step in steps:
        if step.op == "recv" and step.peer == rank:
            coming |= dict.fromkeys((slot(key, step.microbatch) for key in step.keys), len(used))
            used.append(0)
        for key in step.reads(stages):
            if (name := slot(key, step.microbatch)) in coming:
                used[coming.pop(name)] = 1
        if step.op == "send" and step.peer == rank:
            found.append(used.index(0) if 0 in used else len(used))
    return found
