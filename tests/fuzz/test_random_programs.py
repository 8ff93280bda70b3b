"""16 random cases, 320 with `make test-broad`; and of the fuzzer itself: seeds repeat, texts mean what steps mean, a planted fault is
found and made small."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from meshc.rules import contraction, reduction
from meshc.rules.operator import EITHER, Operator
from tests.broad import broad
from tests.fuzz.__main__ import main, run_program, smallest
from tests.fuzz.case import PLAIN, Case, How
from tests.fuzz.check import Captured, check_once
from tests.fuzz.draw import Drawer, outcome, steady
from tests.fuzz.menu import MENU
from tests.fuzz.programs import draw_program
from tests.fuzz.shrink import candidates, shrink
from tests.fuzz.sketch import Leaf, Sketch, Step, module, text

PROGRAMS_A_TEST = 5


ALWAYS = range(15, 16)
BEYOND = [range(first, first + PROGRAMS_A_TEST) for first in range(0, 40, PROGRAMS_A_TEST) if first != 15] + [range(16, 20)]


@pytest.mark.parametrize("seeds", [ALWAYS, *map(broad, BEYOND)], ids=lambda seeds: f"{seeds.start} to {seeds.stop - 1}")
def test_random_cases(seeds: range) -> None:
    outcomes = [found for seed in seeds for _, found in run_program(seed)]
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


def test_a_program_that_reads_the_sign_of_a_zero_is_not_steady() -> None:
    steps = (Step("one", "{out} = torch.relu({0}) * -1.0", ("x0",), ("v0",)),)
    assert steady(Sketch((Leaf("x0", "input", (6, 5), seed=1),), steps, ("v0",)))
    steps += (Step("two", "{out} = torch.copysign({0}, {1})", ("x0", "v0"), ("v1",)),)
    assert not steady(Sketch((Leaf("x0", "input", (6, 5), seed=1),), steps, ("v1",)))


def test_a_planted_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that divides by the rows of a rank instead of all."""
    case = Case(MEAN, False, "a=2", ("a: batch, p0.1; store params",))
    assert check_once(case).kind == "equal"
    monkeypatch.setitem(reduction.OPERATORS, torch.ops.aten.mean.dim, Operator(reduction.reduction_rule("sum")))
    assert check_once(case).kind == "unlike"
    small = shrink(case, lambda one: check_once(one).kind == "unlike", 120.0)
    assert [step.op for step in small.sketch.steps] == ["reduction"]
    assert small.sketch.outputs == ("v2",)
    assert small.plan == ("a: batch",)
    assert "class Model(nn.Module)" in small.script("") and "mean([0])" in text(small.sketch)


def test_a_loss_that_is_zero_but_for_roundings_is_not_steady() -> None:
    leaf = Leaf("x0", "input", (2, 3, 6), grad=True, seed=1)
    norm = Step("norm", "{out} = F.layer_norm({0}, [3, 6])", ("x0",), ("v0",))
    square = Step("square", "{out} = {0} * {0}", ("v0",), ("v1",))
    assert not steady(Sketch((leaf,), (norm,), ("v0",), loss=True))
    assert steady(Sketch((leaf,), (norm,), ("v0",)))
    assert steady(Sketch((leaf,), (norm, square), ("v1",), loss=True))


def test_a_program_that_hangs_on_its_last_digits_is_not_steady() -> None:
    leaf = Leaf("x0", "input", (5, 7), seed=3)
    third = Step("one", "{out} = {0} / 3.0", ("x0",), ("v0",))
    cancels = Step("two", "{out} = ({0} - {1} * 3.0) * 1e10", ("x0", "v0"), ("v1",))
    assert not steady(Sketch((leaf,), (third, cancels), ("v1",)))
    assert steady(Sketch((leaf,), (third,), ("v0",)))


def test_a_kernel_that_is_wrong_about_a_layout_is_no_reference() -> None:
    """torch's batch norm gives a wrong gradient where what comes back lies otherwise than what went in."""
    leaf = Leaf("x0", "input", (2, 1, 4, 4), grad=True)
    norm = Step("norm", "{out} = F.instance_norm({0})", ("x0",), ("v0",))
    turn = Step("permute", "{out} = {0}.permute([1, 2, 3, 0])", ("v0",), ("v1",))
    assert steady(Sketch((leaf,), (norm,), ("v0",)))
    assert not steady(Sketch((leaf,), (norm, turn), ("v1",)))


def test_one_capture_serves_many_plans() -> None:
    from meshc.ir.mesh import Mesh

    ready = Captured(MEAN, False)
    for mesh, plan in (("a=2", "a: batch"), ("a=3", "a: p0.1"), ("a=2,b=2", "a: batch\nb: p0.1")):
        assert ready.check(Mesh(mesh), plan).kind == "equal"
    assert ready.check(Mesh("a=2"), "a: nothing").kind == "refused"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "2", "--plans", "2", "--seed", "1"]) == 0
    assert "2 cases from seed 1: 2 equal" in capsys.readouterr().out


AVERAGE = Sketch(
    (Leaf("x0", "input", (6, 5), seed=1), Leaf("p0", "parameter", (5, 4), seed=2), Leaf("b0", "buffer", (4,), seed=3)),
    (
        Step("matmul", "{out} = {0} @ {1}", ("x0", "p0"), ("v0",)),
        Step("kept", "{out} = {0} - {1}\n{1}.lerp_({0}.detach().mean([0]), 0.5)", ("v0", "b0"), ("v1",)),
        Step("one", "{out} = torch.sin({0})", ("v1",), ("v2",)),
    ),
    ("v2",),
    loss=True,
    batch=6,
)


@pytest.mark.parametrize("how", [PLAIN, How(2), How(2, mean_of_parts=True), How(3, inputs="local", reparse=True)], ids=str)
def test_buffers_are_compared_however_a_step_is_compiled(how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that divides by the rows of a rank shows in the running average alone; it is reduced to nothing but that."""
    case = Case(AVERAGE, True, "dp=2", ("dp: batch",), how)
    assert check_once(case).kind == "equal"
    monkeypatch.setitem(reduction.OPERATORS, torch.ops.aten.mean.dim, Operator(reduction.reduction_rule("sum")))
    found = check_once(case)
    assert found.kind == "unlike" and "buffer after step" in found.why


def test_microbatches_of_what_mixes_the_batch_are_refused() -> None:
    mixes = Step("one", "{out} = {0} - {0}.amax([0])", ("v1",), ("v2",))
    sketch = replace(AVERAGE, steps=(*AVERAGE.steps[:2], mixes))
    assert check_once(Case(sketch, True, "dp=2", ("dp: batch",))).kind == "equal"
    assert check_once(Case(sketch, True, "dp=2", ("dp: batch",), How(2))).kind == "refused"


def test_a_step_keeps_a_parameter_to_train() -> None:
    case = Case(AVERAGE, True, "dp=2", ("dp: batch",))
    smaller = list(candidates(case))
    assert any(one.train for one in smaller) and any(not one.train for one in smaller)
    assert all(one.sketch.of_kind("parameter") for one in smaller if one.train)


@pytest.mark.broad
def test_another_failure_is_no_smaller_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sine that fails hides a matmul that fails otherwise: the sine stays."""

    def sine(node: object, tensors: object) -> None:
        raise KeyError("sine")

    def product(node: object, tensors: object) -> None:
        if not any(user.target is torch.ops.aten.sin.default for user in node.graph.nodes):  # type: ignore[attr-defined]
            raise ValueError("product")
        sine(node, tensors)

    monkeypatch.setitem(contraction.OPERATORS, torch.ops.aten.mm.default, Operator(product, linear=EITHER))
    case = Case(MEAN, False, "a=2", ("a: batch, p0.1",))
    found = check_once(case)
    assert found.kind == "broken" and "KeyError" in found.cause
    small = smallest(case, found, 20.0)
    assert "KeyError" in check_once(small).cause and small.size < case.size


def test_axes_that_do_not_matter_go_first() -> None:
    case = Case(MEAN, False, "dp=2,b=2", ("dp: batch", "b: p0.1", "pin p0: _, p0.1/b"))
    assert next(candidates(case)) == Case(MEAN, False, "b=2", ("b: p0.1", "pin p0: _, p0.1/b"))
    local = replace(case, how=How(inputs="local"))
    assert next(candidates(local)).mesh == "dp=2"
    assert all("dp=2" in one.mesh for one in candidates(local) if one.how.inputs == "local")
