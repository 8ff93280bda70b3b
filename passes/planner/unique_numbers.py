"""Sorted unique small numbers with their inverse, and membership masks: `np.unique` and `np.isin`, but faster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshc.passes.planner.search_space import Numbers


def unique_with_inverse(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Sorted distinct `numbers`, which are not negative, and the index of each number among these."""
    there = membership_mask(int(numbers.max()) + 1 if len(numbers) else 0, numbers)
    return np.flatnonzero(there), (there.cumsum() - 1)[numbers]


def membership_mask(count: int, numbers: Numbers) -> NDArray[np.bool_]:
    """Mask of those of 0 to `count` - 1 that are among `numbers`."""
    found = np.zeros(count, dtype=bool)
    found[numbers] = True
    return found
