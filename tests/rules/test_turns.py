"""Steps in turns where tiles of padding lie between others: seven steps on two ranks by three are tiles of 2, 2, 0, 2, 1 and 0."""

from __future__ import annotations

import pytest
import torch

from meshc.rules.rule import Turns
from meshc.testing.brute_force import BOTH, build, check, run_on_ranks
from tests.rules.samples import SAMPLES

ours = torch.ops.meshc


@pytest.mark.parametrize("op", [ours.recurrence.default, ours.recurrence_backward.default], ids=str)
def test_a_tile_of_padding_hands_on_what_it_was_handed(op: torch._ops.OpOverload) -> None:
    call = SAMPLES[op][0]
    one = build(call)
    (token,) = [token for token in one.tokens() if token[0] == "d1"]
    for parts in (1, 5):
        found = run_on_ranks(one, BOTH, {token: ("a", "b")}, turns=Turns("d0", parts))
        check(call, one, found, f"{op} in {parts} turns")
