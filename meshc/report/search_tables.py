"""Tables of the candidates of a search, chosen one first: pipeline stages, and plans.

tried for the stages: 4 candidates
  microbatches  schedule  stages  predicted  a rank holds
  ------------  --------  ------  ---------  ------------  --------------------------------------------
  4             zb_h1     2       1.3 ms     7.9 MB        taken
  8             zb_h1     2       1.4 ms     7.6 MB        slower than what is taken
  2             zb_h1     2       about 2 ms               slower than what is taken
  4             zb_v      4                  9.1 MB        more than a rank may hold, 8,000,000 bytes

weighed for the plan: 3 candidates
  candidate         by the model  by the clock  a rank holds
  ----------------  ------------  ------------  ------------  ----------------------
  found             144.9 ms      136.6 ms      21.1 GB       taken
  ddp over dp, tp   153.1 ms      141.4 ms      27.4 GB       slower than what is taken
  fsdp+megatron     236.1 ms                    about 18 GB   slower than what is taken
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshc.pipelining.pipeline_candidate import PipelineCandidate
from meshc.plan.plan_candidate import PlanCandidate
from meshc.report.tables import bytes_text, seconds_text, table, without_columns

SHOWN: Final = 20
"""Largest number of rows."""

HEADERS: Final = ("microbatches", "parameters gathered", "schedule", "stages", "recomputed", "predicted", "a rank holds", "")


def stage_candidates_table(tried: Sequence[PipelineCandidate]) -> str:
    """The table of candidates for pipeline stages; "" if there was no choice. Candidates that fit in memory come first."""
    if not tried:
        return ""
    return _table("tried for the stages", "tried", " (times of the microbatches alone)", len(tried), *tried_rows(tried))


def _table(title: str, field: str, note: str, count: int, headers: list[str], rows: list[list[str]]) -> str:
    """A table of `count` candidates, which `program.lowered` has in this field."""
    more = f"\n  and {count - SHOWN} more, in program.lowered.{field}" if count > SHOWN else ""
    return table(rows, headers, f"{title}: {count} candidate{'s' * (count > 1)}{note}") + more + "\n"


def tried_rows(tried: Sequence[PipelineCandidate]) -> tuple[list[str], list[list[str]]]:
    """Headers, and the first rows. Columns with equal cells in all rows are left out."""
    best = sorted(tried, key=lambda each: (bool(each.dropped), each.seconds is None, each.seconds or 0.0))
    rows = [_row(each) for each in best[:SHOWN]]
    same = [column for column, most in ((1, 1), (4, 0), (6, 1)) if len({row[column] for row in rows} - {""}) <= most]
    return without_columns(HEADERS, rows, same)


def _row(one: PipelineCandidate) -> list[str]:
    return [
        str(one.microbatches),
        ("once a call" if one.gather_once else "as they are read") if one.microbatches > 1 else "",
        one.schedule,
        str(len(one.cuts) + 1) if one.cuts else "",
        str(one.again) if one.again else "",
        "" if one.seconds is None else "about " * one.estimated + seconds_text(one.seconds),
        "" if one.holds is None else bytes_text(one.holds),
        one.dropped.partition("\n")[0] or "taken",
    ]


def plan_candidates_table(candidates: Sequence[PlanCandidate]) -> str:
    """The table of plans that were compared; "" if none were."""
    if not candidates:
        return ""
    return _table("weighed for the plan", "weighed", "", len(candidates), *plan_candidate_rows(candidates))


def plan_candidate_rows(candidates: Sequence[PlanCandidate]) -> tuple[list[str], list[list[str]]]:
    """Headers, and the first rows."""
    headers = ["candidate", "by the model", "by the clock", "a rank holds", ""]
    rows = [
        [
            one.name,
            "" if one.modelled is None else seconds_text(one.modelled),
            "" if one.seconds is None else seconds_text(one.seconds),
            "" if one.holds is None else "about " * (one.seconds is None) + bytes_text(one.holds),
            one.dropped.partition("\n")[0] or "taken",
        ]
        for one in candidates[:SHOWN]
    ]  # fmt: skip
    return headers, rows
