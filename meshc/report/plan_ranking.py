"""Ranking of plans that a search has compared on several meshes, fastest first, with time and memory.

    mesh       plan           step      computing  exposed   bubble  a rank holds  of the peak  microbatches  schedule
    ---------  -------------  --------  ---------  --------  ------  ------------  -----------  ------------  --------
    dp=8,tp=8  found          136.6 ms  130.1 ms   6.5 ms            21.1 GB       41.2 %       1
    dp=64      ddp            141.4 ms  130.1 ms   11.3 ms           27.4 GB       39.8 %       1

    next by the planner's model, and not made
    mesh       plan          step
    ---------  ------------  --------------
    dp=8,tp=8  ddp+megatron  about 238.1 ms

"exposed" is communication without computing beside it; "bubble" the time for which the busiest rank waits for other stages; "of the peak"
the model's own arithmetic (matrix products, convolutions, attention, without repetition and padding) over the peak of all devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

from meshc.cost import divided_work, peak_memory
from meshc.cost.devices import Device
from meshc.cost.flops import flops
from meshc.ir import calls, records
from meshc.plan.plan_candidate import PlanCandidate
from meshc.program.program import PlainProgram
from meshc.report.tables import bytes_text, seconds_text, table, without_columns


class RankedPlan(TypedDict):
    """One plan on one mesh; times in seconds."""

    mesh: str
    plan: str
    entries: list[str]
    step_s: float
    computing_s: float
    exposed_s: float
    bubble_s: float
    holds_bytes: int
    of_the_peak: float | None
    microbatches: int
    schedule: str
    dropped: str


class EstimatedPlan(TypedDict):
    """A plan on a mesh that was priced by the planner's model alone: `about_s` is the estimate, `dropped` why it was not lowered."""

    mesh: str
    plan: str
    entries: list[str]
    about_s: float
    dropped: str


def rank_plans(mesh: str, weighed: Iterable[PlanCandidate], ideal_s: float | None) -> list[RankedPlan]:
    """The lowered plans of one mesh. `ideal_s`: seconds of the model's arithmetic at the peak of all devices."""
    return [
        RankedPlan(
            mesh=mesh, plan=one.name, entries=one.plan.splitlines(), step_s=one.seconds, computing_s=one.compute, exposed_s=one.exposed,
            bubble_s=one.idle, holds_bytes=int(one.holds or 0), of_the_peak=None if ideal_s is None else ideal_s / one.seconds,
            microbatches=one.microbatches, schedule=one.schedule, dropped=one.dropped,
        )
        for one in weighed
        if one.seconds is not None
    ]  # fmt: skip


def estimated_plans(mesh: str, weighed: Iterable[PlanCandidate], budget: float) -> list[EstimatedPlan]:
    """The plans of one mesh that were not lowered, although the planner's model predicts memory within `budget` (bytes, without operators'
    workspace)."""
    return [
        EstimatedPlan(mesh=mesh, plan=one.name, entries=one.plan.splitlines(), about_s=one.estimated, dropped=one.dropped)
        for one in weighed
        if one.seconds is None and one.estimated is not None and (one.holds or 0) <= budget
    ]


def expected_text(rows: Sequence[EstimatedPlan], title: str) -> str:
    cells = [[row["mesh"], row["plan"], f"about {seconds_text(row['about_s'])}"] for row in rows]
    return table(cells, ["mesh", "plan", "step"], title)


def text(rows: Sequence[RankedPlan], title: str) -> str:
    headers = ["mesh", "plan", "step", "computing", "exposed", "bubble", "a rank holds", "of the peak", "microbatches", "schedule"]
    cells = [
        [
            row["mesh"], row["plan"], seconds_text(row["step_s"]), seconds_text(row["computing_s"]), seconds_text(row["exposed_s"]),
            seconds_text(row["bubble_s"]) if row["schedule"] else "", bytes_text(row["holds_bytes"]),
            "" if row["of_the_peak"] is None else f"{100 * row['of_the_peak']:.1f} %", str(row["microbatches"]), row["schedule"],
        ]
        for row in rows
    ]  # fmt: skip
    headers, cells = without_columns(headers, cells, [column for column in range(len(headers)) if not any(row[column] for row in cells)])
    return table(cells, headers, title)


def ideal_seconds(program: PlainProgram, device: Device) -> float | None:
    """Seconds of the model's own arithmetic, evenly divided over all devices at their peak rate in the program's dtypes."""
    rows = divided_work.work_rows(program)
    if not rows:
        return None
    by_dtype: Counter[str] = Counter()
    runs = peak_memory.runs(program)
    for stage in program.stages.values():
        for node in calls(stage.graph):
            if done := flops(node) * runs[stage.name]:
                by_dtype[str(records(node)[0].dtype).removeprefix("torch.")] += done  # type: ignore[assignment]
    total = sum(by_dtype.values())
    if not total:
        return None
    peak = sum(done / total / device.flops_per_s.get(name, device.flops_per_s["float32"]) for name, done in by_dtype.items())
    return sum(row.flops for row in rows) * peak / program.mesh.world_size
