"""Shape: of ways to cut, the faster one, unless it sends more for next to nothing."""

from __future__ import annotations

import numpy as np
import pytest

from meshc.passes.stages import schedules
from meshc.passes.stages.cut_places import StageSeconds, StageWork
from meshc.passes.stages.pipeline_shape import PipelineShape, fastest

NONE = np.zeros(0)


def work(seconds: list[float], send_s: list[float]) -> StageWork:
    """Operators of so many seconds, forward; backward twice as long; and what a cut before each of them sends takes."""
    halves = {op: StageSeconds(np.array([0.0, *np.cumsum(seconds)]) * times, (NONE, NONE, NONE)) for op, times in (("F", 1.0), ("B", 2.0))}
    return StageWork(tuple(range(len(seconds) + 1)), halves, send_s)


def shape(*cuts: int) -> PipelineShape:
    return PipelineShape(cuts, (0, 1), schedules.get("1f1b"), 4, trains=True)


@pytest.mark.parametrize(("middle", "taken"), [(0.002, 1), (0.2, 2)])
def test_what_sends_more_must_be_clearly_faster(middle: float, taken: int) -> None:
    """Cut before operator 1, rank 0 has `middle` less to do; cut before operator 2, two values are sent in place of one."""
    made = work([1.0 - middle, middle, 1.0], [0.0, 1e-4, 2e-4])
    seconds = [shape(cut).seconds(made) for cut in (1, 2)]
    assert seconds[1] < seconds[0]
    assert fastest([shape(2), shape(1)], made)[0].cuts == (taken,)
