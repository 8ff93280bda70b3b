"""Memory over a call, as text."""

from __future__ import annotations

from meshc.cost.liveness import Liveness
from meshc.cost.peak_memory import Peak, RankBytes
from meshc.report.memory_report import WIDTH, draw_memory


def hill(forward: int, backward: int, kept: int = 1000) -> Liveness:
    """So many nodes of each phase, each with 10 bytes more than the last, or less; and an update of ten that needs nothing."""
    up = [(10 * (at + 1), "forward") for at in range(forward)]
    down = [(10 * forward * (backward - at) // backward, "backward") for at in range(backward)]
    peak = Peak(10 * forward)
    return Liveness(RankBytes(0, {"parameter": kept}, peak), [*up, *down, *[(0, "update")] * 10], forward - 1, [])


HILL = """
      budget 4.2 kB │┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄▂▃▅▅▄▃▂▁┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄
        peak 4.0 kB │                 ▂▄▆██████████▇▆▅▄▃▂▁
                    │             ▂▄▆██████████████████████▇▆▅▄▃▂▁▁
                    │         ▂▄▆███████████████████████████████████▇▆▅▄▃▂▁
                    │    ▁▃▅▇███████████████████████████████████████████████▇▆▅▄▃▂▁
                    │▁▃▅▇███████████████████████████████████████████████████████████▇▆▅▄▃▂▁
▒ whole call 1.0 kB │███████████████████████████████████████████████████████████████████████▇
                    │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
                     forward─────────────────backward────────────────────────────────────────
                                            ▲
"""


def test_a_call_rises_and_falls() -> None:
    assert "\n".join(draw_memory(hill(300, 600), budget=4200)) == HILL.strip("\n")


def test_it_is_as_wide_whatever_the_length() -> None:
    for forward, backward in ((3, 2), (50, 70), (4000, 9000)):
        lines = draw_memory(hill(forward, backward))
        left = lines[0].index("│") + 1
        assert max(len(line) - left for line in lines) == WIDTH == len(lines[-2]) - left
        assert sum(line.count("█") > 0 for line in lines) >= 1 and lines[-1].strip() == "▲"


def test_the_peak_and_what_is_there_for_good_have_labels() -> None:
    lines = draw_memory(hill(300, 600, kept=3000))
    assert lines[0].startswith("        peak 6.0 kB │") and lines[4].startswith("▒ whole call 3.0 kB │▒▒▒▒")
    assert draw_memory(hill(300, 600), budget=100_000) == draw_memory(hill(300, 600)), "a budget that is far away would flatten the rest"


def test_a_call_that_makes_nothing_has_no_drawing() -> None:
    assert draw_memory(Liveness(RankBytes(0, {"parameter": 10}, Peak()), [(0, "forward")], 0, [])) == []
