"""Messages from a linear program: bounds of every choice, and the highest where sweeps alone stall."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from meshc.passes.planner import narrow_options as narrowing
from meshc.passes.planner.cost_model import CostModel, Leg, ValueGroup
from meshc.passes.planner.dual_ascent import DualAscent
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.narrow_options import close_gap, columns_of, guide_messages, narrow_options
from meshc.passes.planner.relaxation import ProgramColumns
from tests.passes.planner.drawn import MILLI, NOTHING, best, drawn
from tests.passes.planner.test_solver import CLOSE, everything


def everyone(random: np.random.Generator, classes: int, options: int) -> tuple[Lagrangian, list[np.ndarray]]:
    """Classes of which each hands each later one a value, and whose own options cost nothing."""
    model = CostModel(NOTHING, NOTHING, NOTHING, NOTHING, [np.zeros(options) for _ in range(classes)])
    forms = np.arange(options)
    for maker, reader in combinations(range(classes), 2):
        lies, wants = (tuple((((f"{kind}{at}",),), ()) for at in range(options)) for kind in "lw")
        price = random.integers(0, 9, (options, options)) * MILLI
        leg = Leg(reader, forms, "forward", price, np.zeros(price.shape, dtype=bool), (0,))
        model.groups.append(ValueGroup((), 1, maker, forms, lies, wants, (leg,), np.zeros(options), np.zeros(options)))
    memory = drawn(0)[1]
    memory.stored = [np.zeros(len(own)) for own in model.own]
    return Lagrangian(model, memory), everything(model)


def stalled(seed: int) -> tuple[Lagrangian, DualAscent, float]:
    """What sweeps come to, and the most that messages can: the linear program over all."""
    weighed, left = everyone(np.random.default_rng(seed), 5, 3)
    ascent = DualAscent(weighed, left)
    for _ in range(100):
        ascent.sweep()
    relaxed = ProgramColumns(weighed.model, weighed.memory, left).solve_relaxation()
    assert relaxed is not None
    return weighed, ascent, relaxed.bound


@pytest.mark.parametrize("seed", range(20))
def test_charges_of_a_program_over_everything_are_messages_of_its_bound(seed: int) -> None:
    weighed, ascent, most = stalled(seed)
    relaxed = ProgramColumns(weighed.model, weighed.memory, ascent.left).solve_relaxation()
    assert relaxed is not None
    assert ascent.lower_bound <= most + CLOSE
    assert guide_messages(ascent, relaxed.charges).lower_bound == pytest.approx(most, abs=CLOSE)


def test_sweeps_alone_stall_below_it() -> None:
    """Or else there would be nothing to lead."""
    gaps = [most - ascent.lower_bound for _, ascent, most in map(stalled, range(20))]
    assert sum(gap > 0.1 * MILLI for gap in gaps) >= 3


@pytest.mark.parametrize("seed", range(6))
def test_messages_that_are_taken_back_leave_what_there_was_before_any(seed: int) -> None:
    """Shared changes included: the same sweeps come to the same bound, and those that were led are as they were."""
    model, memory = drawn(seed)
    fresh = DualAscent(Lagrangian(model, memory), everything(model))
    swept = DualAscent(Lagrangian(model, memory), everything(model))
    swept.sweep()
    bound, charged = swept.lower_bound, swept.charges()
    nothing = {key: tuple((forms, 0 * seconds) for forms, seconds in one) for key, one in charged.items()}
    silent = guide_messages(swept, nothing)
    for ascent in (fresh, silent):
        ascent.sweep()
    assert silent.lower_bound == fresh.lower_bound == bound == swept.lower_bound
    again = silent.charges()
    assert all((side[1] == after[1]).all() for key, one in charged.items() for side, after in zip(one, again[key], strict=True))


@pytest.mark.parametrize("seed", range(15))
def test_whatever_a_leg_charges_the_bound_is_one(seed: int) -> None:
    """Charges of some forms, much too high or too low: what there is no room for is taken back, shared changes included."""
    model, memory = drawn(seed)
    random, least = np.random.default_rng(seed), best(model)
    ascent = DualAscent(Lagrangian(model, memory), everything(model))
    ascent.sweep()
    says = {
        key: (
            (given[: 1 + seed % len(given)], random.normal(0, 20, 1 + seed % len(given)) * MILLI),
            (wanted[-1:], random.normal(0, 20, 1) * MILLI),
        )
        for key, ((given, _), (wanted, _)) in ascent.charges().items() if random.random() < 0.8
    }  # fmt: skip
    led = guide_messages(ascent, says)
    for number, common in led.common.items():
        price = model.groups[number].legs[0].price[led.edges[[edge.group for edge in led.edges].index(number)].maker.forms]
        assert all((taken <= price + CLOSE).all() for taken in common.taken.values())
    assert led.lower_bound <= least + CLOSE
    led.sweep(least + CLOSE)
    assert led.lower_bound <= least + CLOSE


@pytest.mark.parametrize("seed", range(15))
def test_what_charges_itself_stays_as_it_is(seed: int) -> None:
    model, memory = drawn(seed)
    ascent = DualAscent(Lagrangian(model, memory), everything(model))
    for _ in range(3):
        ascent.sweep()
    assert guide_messages(ascent, ascent.charges()).lower_bound == pytest.approx(ascent.lower_bound, abs=CLOSE)


@pytest.mark.parametrize("seed", range(10))
def test_charges_are_no_farther_than_they_may_be(seed: int) -> None:
    model, memory = drawn(seed)
    ascent = DualAscent(Lagrangian(model, memory), everything(model))
    ascent.sweep()
    known: list[set[int]] = [{0} for _ in ascent.left]
    (far, _), (near, _) = (columns_of(ascent, ascent.lower_bound + MILLI, known, most=3, reach=reach) for reach in (np.inf, 0.25))
    wide, close = far.solve_relaxation(), near.solve_relaxation()
    assert wide is not None and close is not None and close.bound <= wide.bound + CLOSE
    now = ascent.charges()
    assert 0 < near.reach < np.inf and close.charges
    for key, one in close.charges.items():
        for (forms, seconds), (known, before) in zip(one, now[key], strict=True):
            assert (np.abs(seconds - before[np.searchsorted(known, forms)]) <= near.reach + CLOSE).all()


@pytest.mark.parametrize("seed", range(10))
def test_small_programs_lead_to_what_one_over_everything_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few pairs that no program is over all that is left."""
    model, memory = drawn(seed, classes=6)
    weighed = Lagrangian(model, memory)
    most = ProgramColumns(model, memory, everything(model)).solve_relaxation()
    assert most is not None
    for name, few in (("PAIRS", 8), ("ROUNDS", 1), ("SWEEPS", 1)):
        monkeypatch.setattr(narrowing, name, few)
    found = close_gap(narrow_options(weighed, everything(model)))
    least = best(model)
    assert found.bound <= least + CLOSE and found.seconds >= least - CLOSE
    assert found.bound >= min(most.bound, least) * 0.99 - CLOSE or found.seconds == pytest.approx(least)
