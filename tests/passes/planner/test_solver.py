"""Bounds are bounds, and what is found is the best there is: of small problems, by going through all choices."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

import numpy as np
import pytest

from meshc.cost.devices import device
from meshc.passes.planner import narrow_options as narrowing
from meshc.passes.planner.budget_search import BudgetSearch, find_fewest_bytes, search_within_budget
from meshc.passes.planner.cost_model import CostModel
from meshc.passes.planner.dual_ascent import DualAscent
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.narrow_options import close_gap, narrow_options
from meshc.passes.planner.plan_search import PlanSearch
from meshc.passes.planner.relaxation import BRANCHES, Allowance, ProgramColumns
from tests.passes.planner.drawn import GIGA, MILLI, best, choices, drawn
from tests.passes.planner.known import two

CLOSE = 1e-9
"""Seconds."""


def everything(model: CostModel) -> list[np.ndarray]:
    return [np.arange(len(own)) for own in model.own]


def fullest(memory: MemoryModel, pick: tuple[int, ...]) -> float:
    return float(memory.walk(pick).max())


@pytest.mark.parametrize("seed", range(30))
def test_what_is_found_is_the_best_there_is(seed: int) -> None:
    model, memory = drawn(seed)
    found = close_gap(narrow_options(Lagrangian(model, memory), everything(model)))
    least = best(model)
    assert found.seconds == pytest.approx(least)
    assert found.bound <= least + CLOSE
    assert found.bound >= least * (1 - 1e-3) - CLOSE  # branch and bound's own gap


@pytest.mark.parametrize("seed", range(15))
def test_no_sweep_drops_an_option_of_a_best_choice_or_bounds_more_than_it(seed: int) -> None:
    model, memory = drawn(seed)
    least = best(model)
    (first, *_) = [pick for pick in choices(model) if model.seconds(pick) <= least + CLOSE]
    ascent = DualAscent(Lagrangian(model, memory), everything(model))
    bound = ascent.lower_bound
    for _ in range(6):
        ascent.sweep(known=least + CLOSE)
        assert bound - CLOSE <= ascent.lower_bound <= least + CLOSE
        bound = ascent.lower_bound
    assert all(keep[option] for keep, option in zip(ascent.keep, first, strict=True))
    for (group, leg), beyond in ascent.pairs().items():
        edge = next(edge for edge in ascent.edges if (edge.group, edge.leg) == (group, leg))
        a = int(np.searchsorted(edge.maker.forms, model.groups[group].given[first[edge.maker.number]]))
        b = int(np.searchsorted(edge.reader.forms, model.groups[group].legs[leg].forms[first[edge.reader.number]]))
        assert ascent.lower_bound + beyond[a, b] <= least + CLOSE


@pytest.mark.parametrize("seed", range(30))
def test_within_a_budget_too(seed: int) -> None:
    model, memory = drawn(seed, classes=4)
    free = close_gap(narrow_options(Lagrangian(model, memory), everything(model)))
    held = sorted({fullest(memory, pick) for pick in choices(model)})
    budget = (held[0] + min(fullest(memory, free.pick), held[-1])) / 2
    least = best(model, lambda pick: fullest(memory, pick) <= budget)
    picks, bound = search_within_budget(model, memory, budget, free)
    fitting = [model.seconds(pick) for pick in picks if fullest(memory, pick) <= budget]
    assert bound <= least + CLOSE
    assert min(fitting) == pytest.approx(least, rel=1e-2)  # the gap that is looked into no further
    assert bound >= min(fitting) * (1 - 1e-2) - CLOSE


def test_within_a_budget_no_class_alone_makes_what_is_found_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are of moments: what they lead to may be improved by changes that keep the budget."""
    worse = 0
    for seed in range(40):
        model, memory = drawn(seed, classes=5)
        free = close_gap(narrow_options(Lagrangian(model, memory), everything(model)))
        budget = 0.8 * fullest(memory, free.pick)

        def found() -> list[tuple[float, tuple[int, ...]]]:
            picks, _ = search_within_budget(model, memory, budget, free, allowed=Allowance(0.0))  # noqa: B023
            return sorted((model.seconds(pick), pick) for pick in picks if fullest(memory, pick) <= budget)  # noqa: B023

        known = found()
        if not known:
            continue
        seconds, pick = known[0]
        for number, own in enumerate(model.own):
            others = [(*pick[:number], option, *pick[number + 1 :]) for option in range(len(own))]
            assert all(model.seconds(one) >= seconds - CLOSE for one in others if fullest(memory, one) <= budget)
        with monkeypatch.context() as patch:
            patch.setattr(BudgetSearch, "improve_fitting", lambda self: None)
            worse += found()[0][0] > seconds + CLOSE
    assert worse


@pytest.mark.parametrize("seed", range(15))
def test_what_a_price_shows_to_fit_nowhere_is_asked_of_no_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear program takes minutes to say so where almost nothing fits."""
    model, memory = drawn(seed, classes=4)
    free = close_gap(narrow_options(Lagrangian(model, memory), everything(model)))
    least = min(fullest(memory, pick) for pick in choices(model))
    asked: list[int] = []
    monkeypatch.setattr(ProgramColumns, "solve_relaxation", lambda self: asked.append(1))
    for budget, shown in ((0.3 * least, True), (least, False)):
        picks, bound = search_within_budget(model, memory, budget, free)
        assert (bound > max(map(model.seconds, choices(model)))) == shown and bool(asked) <= (not shown)
        assert any(fullest(memory, pick) <= budget for pick in picks) <= (not shown)


def test_what_holds_less_than_the_fewest_bytes_is_asked_of_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price need not show it: of some problems programs are asked where nobody knows of the fewest bytes."""
    asked: list[int] = []
    monkeypatch.setattr(ProgramColumns, "solve_relaxation", lambda self: asked.append(1))
    unknown = 0
    for seed in range(15):
        model, memory = drawn(seed, classes=4)
        free = close_gap(narrow_options(Lagrangian(model, memory), everything(model)))
        known = find_fewest_bytes(model, memory, [free.pick])
        search_within_budget(model, memory, 0.99 * known.bound, free)
        unknown += len(asked)
        asked.clear()
        picks, _ = search_within_budget(model, memory, 0.99 * known.bound, free, fewest=lambda _: known)  # noqa: B023
        assert not asked and min(fullest(memory, pick) for pick in picks) == known.held_bytes
    assert unknown


@pytest.mark.parametrize("seed", range(8))
def test_without_allowance_messages_say_a_bound_and_no_program_is_asked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory = drawn(seed, classes=4)
    free = close_gap(narrow_options(Lagrangian(model, memory), everything(model)))
    held = sorted({fullest(memory, pick) for pick in choices(model)})
    budget = (held[0] + min(fullest(memory, free.pick), held[-1])) / 2
    monkeypatch.setattr(ProgramColumns, "solve_relaxation", lambda self: pytest.fail("a program is asked"))
    monkeypatch.setattr(ProgramColumns, "solve_integer", lambda *given: pytest.fail("a program is asked"))
    _, bound = search_within_budget(model, memory, budget, free, allowed=Allowance(0.0))
    assert free.bound <= bound <= best(model, lambda pick: fullest(memory, pick) <= budget) + CLOSE


def test_programs_of_all_questions_together_keep_the_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are; what is found is the same each time, fits, and says how far from the best it may be."""
    asked: list[int] = []

    def counted(name: str, times: int) -> None:
        real = getattr(ProgramColumns, name)

        def program(self: ProgramColumns, *given: object) -> object:
            asked.extend([times * len(self.rows) * len(self.cost)] if self.moments else [])  # those with a budget
            return real(self, *given)

        monkeypatch.setattr(ProgramColumns, name, program)

    search = PlanSearch(two(1 << 10, 512, 2048, "dp=2,tp=2", "dp: auto\ntp: auto"), device("h100"))
    (free,) = search.find_choices()
    counted("solve_relaxation", 1)
    counted("solve_integer", BRANCHES)
    budgets = [free.certificate.held * part for part in (0.9, 0.7, 0.5)]
    found: list[list[tuple[object, ...]]] = []
    for _ in range(2):
        search.allowed = Allowance(1e6)
        asked.clear()
        answers = [each.find_choices(budget) for each in (search, search.with_overlap()) for budget in budgets]
        assert sum(asked) + search.allowed.left == 1e6 and search.allowed.left > 0
        assert all(one.certificate.held <= one.certificate.budget for some in answers for one in some)
        assert all(one.certificate.bound <= one.certificate.seconds for some in answers for one in some)
        found.append([one.pick for some in answers for one in some])
    assert found[0] == found[1] and found[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_program_that_nothing_answers_ends_a_search_with_what_is_known(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory = drawn(seed)
    monkeypatch.setattr("meshc.passes.planner.linear_program.ITERATIONS", 0)
    monkeypatch.setattr(narrowing, "EXACT", -1.0)
    found = close_gap(narrow_options(Lagrangian(model, memory), everything(model)))
    assert found.bound <= best(model) + CLOSE <= found.seconds + 2 * CLOSE


@pytest.mark.parametrize("seed", range(15))
def test_a_price_of_memory_gives_a_bound_within_the_budget(seed: int) -> None:
    model, memory = drawn(seed, classes=4)
    random = np.random.default_rng(seed)
    held = sorted({fullest(memory, pick) for pick in choices(model)})
    budget = held[len(held) // 3]
    least = best(model, lambda pick: fullest(memory, pick) <= budget)
    moments = random.choice(memory.length, 3, replace=False)
    weighed = Lagrangian(model, memory, {int(moment): float(random.random()) * MILLI / GIGA for moment in moments})
    ascent = DualAscent(weighed, everything(model))
    for _ in range(6):
        ascent.sweep()
    assert ascent.lower_bound - weighed.budget_charge(budget) <= least + CLOSE
    assert ascent.lower_bound <= min(weighed.seconds(pick) for pick in choices(model)) + CLOSE


@pytest.mark.parametrize("seed", range(15))
def test_columns_say_what_the_model_does(seed: int) -> None:
    """With one option left of each class a linear program has one answer: its seconds are the model's, its bytes the walk's."""
    model, memory = drawn(seed)
    random = np.random.default_rng(seed)
    pick = tuple(int(random.integers(len(own))) for own in model.own)
    moments = list(range(memory.length))
    only = [np.array([option]) for option in pick]
    fits = ProgramColumns(model, memory, only, moments=moments, budget=fullest(memory, pick)).solve_relaxation()
    assert fits is not None and fits.is_integral
    assert fits.bound == pytest.approx(model.seconds(pick))
    assert ProgramColumns(model, memory, only, moments=moments, budget=fullest(memory, pick) - GIGA / 2).solve_relaxation() is None


def test_what_several_read_alike_is_changed_once() -> None:
    """Three legs of one value that want one form: one change, of which the messages take no more than it costs."""
    shared = 0
    for seed in range(30):
        model, memory = drawn(seed)
        ascent = DualAscent(Lagrangian(model, memory), everything(model))
        for _ in range(4):
            ascent.sweep()
        for number, common in ascent.common.items():
            edges = [edge for edge in ascent.edges if edge.group == number]
            shared += len(edges) > 1
            price = model.groups[number].legs[0].price[edges[0].maker.forms]
            assert all((taken <= price + CLOSE).all() for taken in common.taken.values())
    assert shared > 20


def test_three_axes_take_a_bounded_amount_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: sweeps of messages, and columns of what is left for a linear program."""
    sweeps, columns = [0], [0]
    swept, built = DualAscent.sweep, ProgramColumns.__post_init__

    def sweep(self: DualAscent, known: float = np.inf) -> None:
        sweeps[0] += 1
        swept(self, known)

    def build(self: ProgramColumns) -> None:
        built(self)
        columns[0] += len(self.cost)

    monkeypatch.setattr(DualAscent, "sweep", sweep)
    monkeypatch.setattr(ProgramColumns, "__post_init__", build)
    search = PlanSearch(two(1 << 16, 4096, 16384, "dp=2,dp_shard=8,tp=8", "dp: auto\ndp_shard: auto\ntp: auto"), device("h100"))
    (free,) = search.find_choices()
    pairs = sum(len(group.lies) * len(group.wants) for group in search.model.groups)
    assert free.certificate.gap < 1e-3 and pairs > 25_000
    assert sweeps[0] <= narrowing.ROUNDS * narrowing.SWEEPS and columns[0] < 3_000


PICKED = """
from meshc.cost.devices import device
from meshc.passes.planner.plan_search import PlanSearch
from tests.passes.planner.known import two
search = PlanSearch(two(2048, 1024, 4096, "dp=2,tp=4", "dp: auto\\ntp: auto"), device("h100"))
(free,) = search.find_choices()
print(free.pick, free.certificate, [(one.pick, one.certificate) for one in search.find_choices(0.8 * free.certificate.held)])

from meshc.text.printer import hash_program
from tests.passes.depth.stacks import Stack, compiled
program = compiled(Stack([16] * 6), "dp=2,tp=2", plan="auto", clip_grad_norm=1.0)
print(program.plan, program.compiled.notes, hash_program(program.compiled))
"""


@pytest.mark.processes
def test_nothing_depends_on_the_order_of_a_set_or_on_threads() -> None:
    """Neither what is chosen nor the program and its plan's text: in this process, and in one of two threads and other hashes."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    changed = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "2"}
    with subprocess.Popen([sys.executable, "-c", PICKED], env=changed, stdout=subprocess.PIPE, text=True) as other:
        with contextlib.redirect_stdout(io.StringIO()) as here:
            exec(PICKED, {})
        there = other.communicate(timeout=120)[0]
    assert here.getvalue() == there and there.count("a gap of") == 2 and "dp, tp: searched;" in there
