"""Choices within a budget of bytes, by the price of a byte at the fullest moments.

    price of a byte       0 ............... rises until what is cheapest fits ...... is narrowed down between what fits and what does not
    bound                 of the weighed model, less price * budget: the highest of all is kept
    options left          those with which the bound is below what the best choice that fits takes
    linear program        over these, with a row for each full moment: its prices of the rows give the next bound, its choice is a candidate
    branches              what the program takes of two ways to lie, a share of each, is one of them in either branch

What is cheapest at a price is a choice that fits somewhat less, or more. Where several moments are full, each has a price of its own: those
at which the cheapest of the choices that are known is dearest (Kelley's cutting planes, J. SIAM 8(4), 1960). At the best of prices the
bound is that of a mixture of choices: three quarters of one that holds too much, a quarter of one that holds less than it need. No price
tells them apart; a class that they decide otherwise does, and the branch with the lower bound is looked into first (Land and Doig,
Econometrica 28(3), 1960).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from scipy.optimize import linprog

from meshc.passes.planner.ascent import Ascent
from meshc.passes.planner.memory import Memory
from meshc.passes.planner.model import Model, Pick
from meshc.passes.planner.narrow import MARGIN, Narrowed, columns_of, decoded
from meshc.passes.planner.solve import Relaxed
from meshc.passes.planner.space import Floats, Numbers
from meshc.passes.planner.weighed import Weighed

START: Final = 0.1
"""What all bytes of the budget cost at first, as a part of the seconds that a choice without a budget takes."""
RISE: Final = 16.0
RISES: Final = 9
"""The price rises so fast, and so often: then nothing fits."""
PRICES: Final = 3
"""That are tried once something fits,"""
INNER: Final = 2
"""and in each branch at once, where what is known is so"""
FAR: Final = 3e-2
"""far from the bound (else one, before it is looked into), none of them more than"""
CAP: Final = 4.0
"""times the one before, nor less than such a part of it."""
SWEEPS: Final = 4
"""At each price, so often until they raise the bound by no more than"""
RAISES: Final = 1e-3
"""of it,"""
MOST: Final = 4
"""or so many times."""
PAIRS: Final = 20_000
"""Of forms in a linear program,"""
ALL: Final = 30_000
"""or so many, where that is all there are."""
BRANCHES: Final = 6
"""Linear programs at most, each of one branch."""
FEW_NODES: Final = 20
"""Of branch and bound within the program of a branch, where it is over all that is left there."""
ENOUGH: Final = 2e-3
"""A gap of this part of the seconds is looked into no further;"""
GOAL: Final = 1e-2
"""nor is one of this part, once branches are needed."""


@dataclass(frozen=True)
class Branch:
    """Some of the options of each class.

    ascent   with those that a better choice may have
    bound    no choice of these options within the budget takes fewer seconds
    weights  the prices, by moment, of the highest bound
    held     classes that have some of their options alone, with these
    """

    ascent: Ascent
    bound: float
    weights: tuple[float, ...] = ()
    held: tuple[tuple[int, frozenset[int]], ...] = ()

    def has(self, pick: Pick) -> bool:
        return all(pick[number] in options for number, options in self.held)


@dataclass
class Within:
    """The search within one budget.

    picks    choices, with their seconds and the bytes at each position
    moments  that some choice found too full
    highest  price that was tried until something fitted
    """

    model: Model
    memory: Memory
    budget: float
    moments: list[int] = field(default_factory=list)
    picks: dict[Pick, tuple[float, Floats]] = field(default_factory=dict)
    highest: float = 0.0

    def note(self, pick: Pick) -> None:
        """The fullest moment of one that does not fit is one of those that have a price from now on."""
        if pick in self.picks:
            return
        walked = self.memory.walk(pick)
        self.picks[pick] = self.model.seconds(pick), walked
        moment = int(walked.argmax())
        if walked.max() > self.budget and moment not in self.moments:
            self.moments.append(moment)

    def _note_all(self, picks: Iterable[Pick]) -> None:
        for pick in picks:
            self.note(pick)

    @property
    def _known(self) -> list[Pick]:
        """The best choice that fits, or else the one that holds least."""
        least = min(self.picks, key=lambda one: (self.picks[one][1].max(), one))
        return [least if self.fitting is None else self.fitting]

    @property
    def fitting(self) -> Pick | None:
        """The best choice that fits."""
        found = [one for one, (_, walked) in self.picks.items() if walked.max() <= self.budget]
        return min(found, key=lambda one: (self.picks[one][0], one), default=None)

    @property
    def best(self) -> float:
        """Its seconds."""
        return np.inf if self.fitting is None else self.picks[self.fitting][0]

    def near(self, bound: float, part: float) -> bool:
        """Whether the best choice that fits is so near to a bound."""
        return self.best < np.inf and self.best - bound <= part * self.best

    # --------------------------------------------------------------------------------------------------------------------------- prices

    def at(self, branch: Branch, weights: Sequence[float]) -> Branch:
        """The bound at these prices, and what it leaves of the options; choices are noted."""
        weighed = Weighed(self.model, self.memory, dict(zip(self.moments, weights, strict=True)))
        ascent, owed = Ascent(weighed, branch.ascent.left, branch.ascent), weighed.owed(self.budget)
        for _ in range(MOST):
            before = ascent.bound
            for _ in range(SWEEPS):
                ascent.sweep((self.best + owed) * (1 + MARGIN))
            if self.best == np.inf:
                self._note_all(decoded(ascent, self._known))
            if ascent.bound - before <= RAISES * abs(ascent.bound - owed):
                break
        bound = ascent.bound - owed
        if not all(keep.any() for keep in ascent.keep):
            return replace(branch, bound=np.inf)  # nothing of it is better than what is known
        if not all(keep.all() for keep in ascent.keep):
            ascent = Ascent(weighed, [row[keep] for row, keep in zip(ascent.left, ascent.keep, strict=True)], ascent)
        self._note_all(decoded(ascent, self._known))
        if bound > branch.bound:
            return replace(branch, ascent=ascent, bound=bound, weights=tuple(weights))
        return replace(branch, ascent=Ascent(branch.ascent.weighed, ascent.left, branch.ascent))

    def rise(self, branch: Branch) -> Branch:
        """Until something fits, or nothing does."""
        weight = START * branch.bound / self.budget
        for _ in range(RISES):
            if self.best < np.inf:
                break
            branch = self.at(branch, [weight] * len(self.moments))
            self.highest = weight
            weight *= RISE
        return branch

    def narrow(self, branch: Branch, prices: int) -> Branch:
        """Prices at which the cheapest of the known choices is dearest, while that finds new ones and the bound is not there."""
        for _ in range(prices):
            known = len(self.picks)
            weights, most = self.dearest(branch)
            if self.near(branch.bound, ENOUGH) or most - branch.bound <= ENOUGH * abs(most):
                break
            branch = self.at(branch, weights)
            if len(self.picks) == known:
                break
        return branch

    def dearest(self, branch: Branch) -> tuple[list[float], float]:
        """Prices of the moments, and what the cheapest known choice of a branch costs at them, which is the most."""
        inside = [found for pick, found in self.picks.items() if branch.has(pick)]
        rows = [[*((self.budget - walked[self.moments]) * 1e-9), 1.0] for _, walked in inside]
        seconds, count = [1e3 * one for one, _ in inside], len(self.moments)
        known = max(branch.weights, default=self.highest)
        cap = CAP * known * 1e12
        bounds = [(cap / CAP**2 if count == 1 and branch.held else 0, cap)] * count
        found = linprog([*[0.0] * count, -1.0], rows, seconds, bounds=[*bounds, (None, None)], method="highs")
        assert found.status == 0, found.message
        return [float(one) * 1e-12 for one in found.x[:-1]], float(found.x[-1]) / 1e3

    # ------------------------------------------------------------------------------------------------------------------------- branches

    def branches(self, root: Branch) -> float:
        """The bound of all branches, the lowest looked into first, until what is known is near to it."""
        waiting, closed = [root], np.inf
        for _ in range(BRANCHES):
            lowest = min(waiting, key=lambda one: one.bound, default=None)
            if lowest is None or self.near(lowest.bound, ENOUGH if lowest is root else GOAL):
                break
            waiting.remove(lowest)
            if lowest is not root and self.near(lowest.bound, FAR):
                lowest = self.narrow(lowest, 1)
            bound, inner = self.looked_into(lowest)
            closed = min(closed, bound)
            waiting += inner
        return min(self.best, closed, *(one.bound for one in waiting)) if waiting or closed < np.inf else self.best

    def looked_into(self, branch: Branch) -> tuple[float, list[Branch]]:
        """A linear program over what costs least beyond the bound. If that is all there is, its bound; else the branches of this one."""
        known = self.best + branch.ascent.weighed.owed(self.budget)
        columns, everything = columns_of(branch.ascent, known, self._known, self.moments, self.budget, most=PAIRS, everything=ALL)
        relaxed = columns.relaxed()
        if relaxed is None and (everything or self.best == np.inf):
            return np.inf if everything else branch.bound, []
        if relaxed is not None:
            pick = columns.rounded(relaxed.shares)
            self._note_all([pick, *decoded(branch.ascent, [pick])])
        if everything and relaxed is not None:
            bound = max(branch.bound, relaxed.bound)
            if not relaxed.whole and not self.near(bound, GOAL):
                found, least = columns.whole(FEW_NODES, GOAL / 2)
                bound = max(bound, least or bound)
                if found is not None:
                    self.note(found)
            if relaxed.whole or self.near(bound, GOAL):
                return bound, []
        weights = self._between(branch.weights, branch.weights if relaxed is None else relaxed.weights)
        halves = [self.at(one, weights) for one in self._halves(branch, relaxed, columns.left)]
        far = not self.near(branch.bound, FAR)
        return np.inf, [self.narrow(one, INNER) if far else one for one in halves]

    def _between(self, one: Sequence[float], other: Sequence[float]) -> list[float]:
        """Prices half way: a program over some of the options says too much."""
        near, far = ([*prices, *[0.0] * (len(self.moments) - len(prices))] for prices in (one, other))
        return [(a + b) / 2 for a, b in zip(near, far, strict=True)]

    def _halves(self, branch: Branch, relaxed: Relaxed | None, left: Sequence[Numbers]) -> list[Branch]:
        """By the class of which the program takes a share of options that hold most and least, or, without one, the options differ most:
        those that hold more than it takes on average, and those that hold less."""
        weighed, best, most, limit = self._bytes(), 0, -1.0, 0.0
        for number, row in enumerate(branch.ascent.left):
            held = weighed[number]
            if relaxed is None:
                spread, mean = float(np.ptp(held[row])), float(held[row].mean())
            else:
                share = relaxed.shares[number]
                mean = float(share @ held[left[number]])
                spread = float(share @ np.abs(held[left[number]] - mean))
            if spread > most and (held[row] <= mean).any() and (held[row] > mean).any():
                best, most, limit = number, spread, mean
        row = branch.ascent.left[best]
        light = weighed[best][row] <= limit
        return [self._with(branch, best, row[part]) for part in (light, ~light) if part.any()]

    def _bytes(self) -> list[Floats]:
        """That each class's options hold at the full moments, all of these together."""
        weighed = Weighed(self.model, self.memory, dict.fromkeys(self.moments, 1.0))
        return [plain - own for plain, own in zip(weighed.plain, self.model.own, strict=True)]

    def _with(self, branch: Branch, number: int, options: Numbers) -> Branch:
        left = [*branch.ascent.left]
        left[number] = options
        held = (*branch.held, (number, frozenset(options.tolist())))
        return replace(branch, ascent=Ascent(branch.ascent.weighed, left, branch.ascent), held=held)


def within(model: Model, memory: Memory, budget: float, free: Narrowed, known: Sequence[Pick] = ()) -> tuple[list[Pick], float]:
    """Choices, and a bound on those that hold no more than the budget."""
    search = Within(model, memory, budget)
    for pick in (free.pick, *known):
        search.note(pick)
    root = search.rise(Branch(free.whole, free.bound))
    bound = search.branches(search.narrow(root, PRICES) if search.best < np.inf else root)
    return list(search.picks), bound
