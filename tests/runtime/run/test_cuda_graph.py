"""What is recorded when, and what is handed out, with a recorder that takes down nothing but what is to be done, and does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from meshc.runtime.run.cuda_graph import WARM_UP, WORTH, GraphedCalls, refusal

Values = dict[str, torch.Tensor]


class Sum:
    """A program that adds its input to a state, and to a cache's buffer where it lies if it has one."""

    device = torch.device("cpu")

    def __init__(self, with_cache: bool = False) -> None:
        self.state = torch.zeros(2)
        self.lent = ("input:cache",) if with_cache else ()
        self.noted = 0
        self.recordings: list[Values] = []
        self.calls = GraphedCalls(self, must=True, record=self.record)

    def __call__(self, x: float, cache: torch.Tensor | None = None, **numbers: float) -> Values:
        given = [torch.full((2,), x)] + ([] if cache is None else [cache])
        return self.calls.run(given, numbers)

    def values(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, float]) -> Values:
        named = dict(zip(("input:x", *self.lent), tensors, strict=True))
        return {**named, "state:s": self.state, **{f"number:{name}": torch.tensor(value) for name, value in numbers.items()}}

    def work(self, values: Values) -> Values:
        self.state.add_(values["input:x"])
        found = {"output:sum": self.state * 1}
        return {**found, "output:cache": values["input:cache"].add_(values["input:x"])} if self.lent else found

    def note_written(self) -> None:
        self.noted += 1

    def record(self, work: Callable[[], Values]) -> tuple[Values, Callable[[], object]]:
        """As CUDA does: nothing is computed, places stay."""
        kept: Values = {}

        def replay() -> None:
            for key, value in work().items():
                kept.setdefault(key, value).copy_(value)

        self.recordings.append(kept)
        kept["output:sum"] = torch.zeros(2)
        return kept, replay


def test_a_step_is_recorded_once_and_what_it_gives_is_a_copy():
    step = Sum()
    found = [step(float(x))["output:sum"] for x in range(1, 9)]
    assert [value[0].item() for value in found] == [1, 3, 6, 10, 15, 21, 28, 36]  # none was overwritten by a later call
    assert len(step.recordings) == 1 and step.calls.status == "on"
    assert step.noted == 8 - WARM_UP


def test_a_number_that_is_baked_in_is_recorded_again():
    step = Sum()
    for beta in (0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.8):
        step(1.0, beta=beta, **{"0.lr": beta})
    assert len(step.recordings) == 2
    for lr in (0.1, 0.2):
        step(1.0, beta=0.8, **{"0.lr": lr})
    assert len(step.recordings) == 2  # which a kernel reads from memory


def test_buffers_of_a_cache_are_written_where_they_lie():
    step, cache = Sum(with_cache=True), torch.zeros(2)
    for x in range(1, 9):
        assert step(float(x), cache)["output:cache"].data_ptr() == cache.data_ptr()
    assert cache[0] == 36 and len(step.recordings) == 1


def test_two_caches_that_take_turns_are_recorded_for_the_one_that_stays():
    step, one, two = Sum(with_cache=True), torch.zeros(2), torch.zeros(2)
    for cache in (one, two) * 4:
        step(1.0, cache)
    assert not step.recordings and (one[0], two[0]) == (4, 4)
    for cache in (two, two, two, one, two, one):
        step(1.0, cache)
    assert len(step.recordings) == 1 and (one[0], two[0]) == (6, 8)


def test_recordings_that_are_hardly_replayed_wait_longer():
    step = Sum(with_cache=True)
    kept = [torch.zeros(2) for _ in range(40)]
    for cache in kept:
        for _ in range(3):
            step(1.0, cache)
    assert all(cache[0] == 3 for cache in kept)
    assert len(step.recordings) < 8
    for _ in range(WORTH * 4):
        step(1.0, kept[0])
    assert step.calls.replayed > WORTH


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"mode": "forward"}, "Options(debugging=Debugging(cuda_graph=True)) alone"),
        ({"mode": "forward", "has_cache": True}, ""),
        ({"mode": "forward", "has_backward": True, "has_cache": True}, "backward is another call"),
        ({"mode": "step", "waits_on_device": False}, "use nccl"),
        ({"mode": "step"}, ""),
    ],
)
def test_what_is_no_graph(how, said):
    found = refusal(torch.device("cuda"), "auto", **{"waits_on_device": True, **how})
    assert said in found and bool(found) == bool(said)
