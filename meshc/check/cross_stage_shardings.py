"""Shardings of values with plain types across stages: inferred in the stage that computes a value, for the stages that read it.

    before    keep_first_1: "f64[4, 2, 2]" = keep_first(zeros, coordinate_1)      inferred: [experts 4, in 2, out 2] partial(sum: a)
    each      keep_first_1: "f64[4, 2, 2]" = "value:keep_first_1"                 read with this sharding

A rule's lowering of one operator consists of lines with plain types; those that are equal for all microbatches are in another stage.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from meshc import ir
from meshc.check.inferred_sharding import InferredSharding
from meshc.ir import Record
from meshc.program.program import PlainProgram


class CrossStageShardings:
    """Inferred shardings by key, of the stages checked so far."""

    def __init__(self, program: PlainProgram) -> None:
        self._makers = Counter(key for stage in program.stages.values() for key in stage.outputs)
        self._others = {port.key for port in program.inputs} | {step.into for step in program.schedule}
        self._found: dict[str, list[tuple[tuple[int, ...], InferredSharding]]] = {}

    def give(self, key: str, value: Node, spread: InferredSharding) -> None:
        self._found.setdefault(key, []).append((tuple(ir.record(value).shape), spread))

    def of(self, key: str, record: Record) -> InferredSharding | None:
        """The sharding inferred under `key`; None if unknown, if writers disagree, or if a port or an accumulation has the same key."""
        found = self._found.get(key, [])
        if not found or len(found) < self._makers[key] or key in self._others:
            return None
        shape, spread = found[0]
        return spread if shape == tuple(record.shape) and all(one == found[0] for one in found) else None
