"""What is not made because a plan on another mesh is faster than anything here could be."""

from __future__ import annotations

import pytest

from meshc.cost.program_clock import program_seconds
from meshc.passes.driver.measured_program import MARGIN
from meshc.passes.driver.search_errors import BY_ESTIMATE, BY_MODEL, BY_STAGES, NoFasterPlan
from meshc.text.printer import print_program
from tests import models
from tests.captured import Captured
from tests.passes.driver.test_choose import adam


def test_a_mesh_whose_bound_is_above_what_is_known_is_not_searched() -> None:
    captured = Captured(models.mlp(batch=8, width=64), train=True, double=False)
    ask = adam(captured)
    free = captured.program("dp=2,tp=2", "auto", **ask)
    took_s = program_seconds(free).total
    with pytest.raises(NoFasterPlan) as caught:
        captured.program("dp=2,tp=2", "auto", **ask, beaten_s=1e-9)
    assert caught.value.by == BY_MODEL and 1e-9 < caught.value.least_s <= took_s * (1 + MARGIN)
    assert str(caught.value).startswith("at best ") and str(caught.value).endswith("; a plan of 0.0 ms is known")
    with pytest.raises(NoFasterPlan) as below:  # the bound is not far enough above what is known, and every estimate is
        captured.program("dp=2,tp=2", "auto", **ask, beaten_s=caught.value.least_s / (1 + MARGIN) * 1.001)
    assert below.value.by == BY_ESTIMATE and below.value.least_s >= caught.value.least_s
    assert print_program(captured.program("dp=2,tp=2", "auto", **ask, beaten_s=2 * took_s)) == print_program(free)


def test_stages_share_the_work_in_equal_parts_at_best() -> None:
    captured = Captured(models.mlp(batch=8, width=64), train=True, double=False)
    least = []
    for mesh in ("tp=2", "pp=2,tp=2"):
        with pytest.raises(NoFasterPlan) as caught:
            captured.program(mesh, "auto" if mesh == "tp=2" else "tp: auto", **adam(captured), beaten_s=1e-12)
        least.append(caught.value.least_s)
    assert least[1] == pytest.approx(least[0] / 2)


@pytest.mark.broad
def test_stages_that_are_estimated_to_be_slower_are_not_cut() -> None:
    captured = Captured(models.nanogpt(batch=4, seq=8, hidden=16, layers=2, heads=2, vocab=13), train=True, double=False)
    with pytest.raises(NoFasterPlan) as caught:
        captured.program("pp=2", None, microbatches=None, beaten_s=1e-9)
    assert caught.value.by == BY_STAGES and caught.value.least_s > 1e-9
