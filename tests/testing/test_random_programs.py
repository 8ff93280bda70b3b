"""200 random cases; and of the fuzzer itself: seeds repeat, texts mean what steps mean, a planted fault is found and made small."""

from __future__ import annotations

import random

import pytest
import torch

from meshc.passes.rules import reduction
from meshc.testing.__main__ import main, run_program
from meshc.testing.check import Captured, check_once
from meshc.testing.draw import Drawer, outcome, steady
from meshc.testing.menu import MENU
from meshc.testing.programs import draw_program
from meshc.testing.shrink import Case, shrink
from meshc.testing.sketch import Leaf, Sketch, Step, module, script, text

PROGRAMS_A_TEST = 5


@pytest.mark.parametrize("first", range(0, 40, PROGRAMS_A_TEST))
def test_random_cases(first: int) -> None:
    outcomes = [found for seed in range(first, first + PROGRAMS_A_TEST) for _, found in run_program(seed)]
    assert [found.why for found in outcomes if found.failed] == []
    assert sum(found.kind == "equal" for found in outcomes) >= 0.8 * len(outcomes)


def test_a_seed_is_a_program() -> None:
    assert draw_program(7) == draw_program(7)
    assert draw_program(7) != draw_program(8)


@pytest.mark.parametrize("name", MENU)
def test_every_entry_of_the_menu_can_be_drawn(name: str) -> None:
    drawer = Drawer(random.Random(name))
    drawer.extents = [1, 4, 6, 5]
    for shape in ([6], [4, 6], [5, 4, 6], [2, 6, 4, 4]):
        drawer.leaf(shape)
    assert any(drawer.attempt(name, MENU[name]) for _ in range(50))


@pytest.mark.parametrize("seed", [2, 11])
def test_the_text_of_a_program_computes_what_its_steps_compute(seed: int) -> None:
    sketch = draw_program(seed)
    found = module(sketch)(**sketch.inputs())
    wanted = outcome(sketch)
    if sketch.loss:
        total = sum(value.mean() for value in wanted[: len(sketch.outputs)])
        torch.testing.assert_close(found, total)
    else:
        for one, other in zip(found, wanted, strict=False):
            assert one.shape == other.shape and one.dtype == other.dtype


MEAN = Sketch(
    (Leaf("x0", "input", (6, 5), seed=1), Leaf("p0", "parameter", (5, 4), seed=2)),
    (
        Step("matmul", "{out} = {0} @ {1}", ("x0", "p0"), ("v0",)),
        Step("one", "{out} = torch.tanh({0})", ("v0",), ("v1",)),
        Step("reduction", "{out} = {0}.mean([0])", ("v1",), ("v2",)),
        Step("one", "{out} = torch.sin({0})", ("v2",), ("v3",)),
        Step("one", "{out} = {0} * 0.5", ("v1",), ("v4",)),
    ),
    ("v3", "v4"),
)


def test_a_planted_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that divides by the rows of a rank instead of all."""
    case = Case(MEAN, False, "a=2", ("a: batch, p0.1; store params",))
    assert check_once(MEAN, False, "a=2", case.plan[0]).kind == "equal"
    monkeypatch.setitem(reduction.RULES, torch.ops.aten.mean.dim, lambda node, tensors: reduction._sum(node, tensors))
    assert check_once(MEAN, False, "a=2", case.plan[0]).kind == "unlike"
    small = shrink(case, lambda one: check_once(one.sketch, one.train, one.mesh, "\n".join(one.plan)).kind == "unlike", 120.0)
    assert [step.op for step in small.sketch.steps] == ["reduction"]
    assert small.sketch.outputs == ("v2",)
    assert small.plan == ("a: batch",)
    assert "class Model(nn.Module)" in script(small.sketch, small.mesh, small.plan[0], "") and "mean([0])" in text(small.sketch)


def test_a_program_that_hangs_on_its_last_digits_is_not_steady() -> None:
    leaf = Leaf("x0", "input", (5, 7), seed=3)
    third = Step("one", "{out} = {0} / 3.0", ("x0",), ("v0",))
    cancels = Step("two", "{out} = ({0} - {1} * 3.0) * 1e10", ("x0", "v0"), ("v1",))
    assert not steady(Sketch((leaf,), (third, cancels), ("v1",)))
    assert steady(Sketch((leaf,), (third,), ("v0",)))


def test_one_capture_serves_many_plans() -> None:
    from meshc.mesh import Mesh

    ready = Captured(MEAN, False)
    for mesh, plan in (("a=2", "a: batch"), ("a=3", "a: p0.1"), ("a=2,b=2", "a: batch\nb: p0.1")):
        assert ready.check(Mesh(mesh), plan).kind == "equal"
    assert ready.check(Mesh("a=2"), "a: nothing").kind == "refused"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "2", "--plans", "2", "--seed", "1"]) == 0
    assert "2 cases from seed 1: 2 equal" in capsys.readouterr().out
