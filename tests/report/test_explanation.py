"""What is said of alternatives that the planner's model has faster than what was taken."""

from __future__ import annotations

import pytest

from meshc.report.explanation import Alternative, Explanation, Fall, ParameterStorage, text


def explained(*more_s: float) -> Explanation:
    others: list[Alternative] = [
        {"option": f"[ffn 8, hidden {number}]", "more_s": one, "holds_bytes": 1000, "falls": [Fall(what="all_gather over dp", more_s=one)]}
        for number, one in enumerate(more_s)
    ]
    dp = {"parameter": "[ffn 8/dp]"}, {"parameter": "(Shard(0)) over (dp)"}
    stored = ParameterStorage(sharding=dp[0], placements=dp[1], alike=0, readers=[], others={"parameter": others})
    return Explanation(name="up.weight", searched=True, stored=stored, line=None, operators=[], further=0, remembered=[])


@pytest.mark.parametrize("more_s, said", [((1e-3, 2e-3), 0), ((-1e-3, 2e-3), 1), ((-1e-3, -2e-3), 1)])
def test_what_takes_less_by_the_model_is_said_to_be_slower_by_the_clock(more_s: tuple[float, ...], said: int) -> None:
    lines = text(explained(*more_s)).splitlines()
    assert sum("by the clock what is taken is faster" in line for line in lines) == said
    assert [line.split(", a rank")[0].split("]")[-1].strip() for line in lines if "a rank holds" in line] == [
        f"{'-' if one < 0 else '+'} {abs(1e3 * one):.0f} ms" for one in more_s
    ]
