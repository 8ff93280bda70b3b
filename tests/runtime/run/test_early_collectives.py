"""What starts within a run begins as soon as its sums are whole, in the order of the list, and means what the list says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshc.errors import StateError
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port
from meshc.runtime.comm.collectives import CollectiveWork
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run import executor
from meshc.runtime.run.executor import EarlyStart, Executor, sum_listener
from meshc.runtime.simulator.simulation import simulate
from meshc.text.parse import parse_stage

EACH = """def each(x: "f32[4]" = "input:x", y: "f32[4]" = "parameter:y"):
    a: "f32[4]" = aten.sin(x)
    b: "f32[4]" = aten.mul.Tensor(a, y)
    c: "f32[4]" = aten.exp(b)
    d: "f32[4]" = aten.neg(c)
    return {"part:d": d, "part:c": c, "part:b": b, "part:a": a}
"""
START_B = """def start_b(a: "f32[4]" = "sum:a", b: "f32[4]" = "sum:b"):
    joined: "f32[8]" = aten.cat([a, b])
    r: "f32[8]" = all_reduce(joined, ["dp"], "sum")
    return {"early:b": r}
"""
START_C = """def start_c(c: "f32[4]" = "sum:c"):
    r: "f32[4]" = all_reduce(c, ["dp"], "max")
    return {"early:c": r}
"""
AFTER = """def after(b: "f32[8]" = "early:b", c: "f32[4]" = "early:c", a: "f32[4]" = "sum:a", d: "f32[4]" = "sum:d"):
    first: "f32[4]" = aten.slice.Tensor(b, 0, 0, 4)
    one: "f32[4]" = aten.add.Tensor(first, a)
    two: "f32[4]" = aten.add.Tensor(c, d)
    return {"output:one": one, "output:two": two}
"""


def run(microbatch: int) -> list[Instruction]:
    adds = [Instruction("add", "each", microbatch, f"part:{name}", f"sum:{name}") for name in "dcba"]
    return [Instruction("run", "each", microbatch), *adds]


STARTS = [
    Instruction("start", "start_b", 1, keys=("sum:a", "sum:b"), during="each"),
    Instruction("start", "start_c", 1, keys=("sum:c",), during="each"),
]


def program(*schedule: Instruction) -> PlainProgram:
    stages = {stage.name: stage for stage in map(parse_stage, (EACH, START_B, START_C, AFTER))}
    ports = tuple(Port(kind, name, (4,), torch.float32) for kind, name in (("input", "x"), ("parameter", "y")))
    outputs = tuple(Port("output", name, (4,), torch.float32) for name in ("one", "two"))
    return PlainProgram(stages, Mesh("dp=1"), Plan("dp: -"), ports, outputs, schedule, {}, {"dp": 1, "mb": 2}, 2)


def whole() -> PlainProgram:
    return program(*run(0), *run(1), *STARTS, Instruction("run", "after"))


def load(made: PlainProgram) -> Executor:
    return Executor(made, Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu"))


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(4, generator=generator) for key in ("input:x", "parameter:y")}


def test_each_begins_when_the_last_of_its_sums_is_whole_and_nothing_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """sum:a, which another stage reads, stays; sum:b and sum:c are gone as soon as they are on their way."""
    told: list[Any] = []

    def telling(starts: list[EarlyStart], env: dict[str, Any]) -> Any:
        grown = sum_listener(starts, env)

        def and_told(key: str) -> None:
            grown(key)
            there = sorted(name for name in env if name.startswith(("sum:", "early:")))
            assert all(isinstance(env[name], CollectiveWork) for name in there if name.startswith("early:"))
            told.append((key, there))

        return and_told

    monkeypatch.setattr(executor, "sum_listener", telling)
    loaded = load(whole())
    for _ in range(2):  # calls
        told.clear()
        env = loaded.run(values())
        assert told == [
            ("sum:a", ["sum:a", "sum:b", "sum:c", "sum:d"]),
            ("sum:b", ["early:b", "sum:a", "sum:c", "sum:d"]),
            ("sum:c", ["early:b", "early:c", "sum:a", "sum:d"]),
            ("sum:d", ["early:b", "early:c", "sum:a", "sum:d"]),
        ]
        assert not any(key.startswith(("early:", "sum:", "part:")) for key in env)


def test_it_means_what_the_simulator_plays() -> None:
    env, expected = load(whole()).run(values()), simulate(whole(), values())
    for key in ("output:one", "output:two"):
        torch.testing.assert_close(env[key], expected[key], rtol=0, atol=0)


def test_starts_keep_the_order_of_the_list() -> None:
    """The second has its sum first, and waits for its turn."""
    began: list[str] = []
    starts = [
        EarlyStart(lambda env: began.append("one"), frozenset({"sum:b"})),
        EarlyStart(lambda env: began.append("two"), frozenset({"sum:a"})),
    ]
    grown = sum_listener(starts, {})
    grown("sum:a")
    assert began == []
    grown("sum:b")
    assert began == ["one", "two"]


@pytest.mark.parametrize("at", [5, 12])
def test_a_start_that_stands_elsewhere_is_refused(at: int) -> None:
    schedule = [*run(0), *run(1), STARTS[1], Instruction("run", "after")]
    schedule.insert(at, STARTS[0])
    with pytest.raises(StateError, match="the schedule starts start_b elsewhere than behind the run of each that it names"):
        load(program(*schedule))
