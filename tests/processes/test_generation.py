"""Generation by compiled stock models on real ranks; each test is one launch that makes many checks."""

from __future__ import annotations

import pytest

from tests.broad import broad
from tests.processes.test_processes import run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "mesh, ranks, names",
    [
        ("tp=2", 2, ("short", "refusals")),
        ("dp=2", 2, ("own_draws",)),
        broad("tp=2", 2, ("greedy",)),
        broad("tp=2", 2, ("seeds",)),
        broad("tp=2", 2, ("rows", "copies", "sampled", "beams_and_chunks", "windows_and_static", "turns", "looked_at", "pipelines")),
        broad("tp=2", 2, ("windows", "windows_held")),
        broad("tp=2", 2, ("encoders", "lengths", "lengths_followed")),
        broad("tp=2", 2, ("states", "states_held")),
        broad("dp=2", 2, ("encoders", "greedy", "rows", "beams_and_chunks", "turns", "looked_at")),
        broad("pp=2", 2, ("greedy", "rows", "sampled")),
        broad("cp=2", 2, ("greedy", "rows", "windows_and_static")),
        broad("dp=2", 2, ("windows", "windows_held")),
        broad("cp=2", 2, ("windows", "windows_held")),
        broad("dp=2,tp=2", 4, ("greedy", "sampled")),
        broad("dp=2,tp=2", 4, ("states", "states_held")),
        broad("pp=2,tp=2", 4, ("greedy",)),
    ],
)  # fmt: skip
def test_generation_equals_the_plain_model(mesh: str, ranks: int, names: tuple[str, ...]) -> None:
    assert run("generation", ranks, mesh, *names).split() == [*names]


@pytest.mark.parametrize("mesh, ranks", [broad("tp=2", 2), broad("dp=2", 2), broad("dp=2,tp=2", 4)])
def test_generation_from_sound_and_pictures_equals_the_plain_model(mesh: str, ranks: int) -> None:
    checks = ("heard", "seen", "read_beside_images", "told_by_a_model_inside")
    assert run("heard", ranks, mesh, *checks).split() == [*checks]
