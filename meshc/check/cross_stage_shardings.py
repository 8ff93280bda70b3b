"""Shardings of values with plain types across stages: what the stage that computes a value knows, for the stages that read it.

    before    keep_first_1: "f64[4, 2, 2]" = keep_first(zeros, coordinate_1)      is known to be [experts 4, in 2, out 2] partial(sum: a)
    each      keep_first_1: "f64[4, 2, 2]" = "value:keep_first_1"                 so it is here

What is made once for all microbatches may stand among the lines that a rule writes for one operator, which have plain types.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from meshc import ir
from meshc.check.inferred_sharding import InferredSharding
from meshc.ir import Record
from meshc.program.program import PlainProgram


class CrossStageShardings:
    """What is known of values by their keys, of the stages that have been followed so far."""

    def __init__(self, program: PlainProgram) -> None:
        self._makers = Counter(key for stage in program.stages.values() for key in stage.outputs)
        self._others = {port.key for port in program.inputs} | {step.into for step in program.schedule}
        self._found: dict[str, list[tuple[tuple[int, ...], InferredSharding]]] = {}

    def give(self, key: str, value: Node, spread: InferredSharding) -> None:
        self._found.setdefault(key, []).append((tuple(ir.record(value).shape), spread))

    def of(self, key: str, record: Record) -> InferredSharding | None:
        """None where nothing is known, as where the stages that make it do not agree, or something else has this key, too."""
        found = self._found.get(key, [])
        if not found or len(found) < self._makers[key] or key in self._others:
            return None
        shape, spread = found[0]
        return spread if shape == tuple(record.shape) and all(one == found[0] for one in found) else None
