"""What searches have tried, as tables."""

from __future__ import annotations

from expecttest import assert_expected_inline

from meshc.pipelining.pipeline_candidate import PipelineCandidate
from meshc.plan.plan_candidate import PlanCandidate
from meshc.report.search_tables import SHOWN, plan_candidates_table, stage_candidates_table


def test_what_is_taken_comes_first_and_what_does_not_fit_last() -> None:
    tried = (
        PipelineCandidate(4, True, "zb_v", (3, 7, 11), holds=9_100_000, dropped="more than a rank may hold, 8,000,000 bytes"),
        PipelineCandidate(8, False, "zb_h1", (7,), 1.4e-3, 7_600_000, "slower than what is taken"),
        PipelineCandidate(4, True, "dualpipe_v", dropped="dualpipe_v has 2 stages on each rank\n  what to do: another"),
        PipelineCandidate(4, True, "zb_h1", (7,), 1.3e-3, 7_900_000),
    )
    assert_expected_inline(stage_candidates_table(tried), """\
tried for the stages: 4 candidates (times of the microbatches alone)
  microbatches    parameters gathered    schedule    stages    predicted    a rank holds
  --------------  ---------------------  ----------  --------  -----------  --------------  ------------------------------------------
  4               once a call            zb_h1       2         1.3 ms       7.9 MB          taken
  8               as they are read       zb_h1       2         1.4 ms       7.6 MB          slower than what is taken
  4               once a call            zb_v        4                      9.1 MB          more than a rank may hold, 8,000,000 bytes
  4               once a call            dualpipe_v                                         dualpipe_v has 2 stages on each rank
""")


def test_no_choice_is_no_table_and_a_long_one_ends() -> None:
    assert stage_candidates_table(()) == ""
    lines = stage_candidates_table([PipelineCandidate(1, True, "1f1b", (1,), 1.0)] * (SHOWN + 5)).splitlines()
    assert lines[-1] == "  and 5 more, in program.lowered.tried" and len(lines) == 3 + SHOWN + 1
    assert "gathered" not in lines[1] and "holds" not in lines[1]


def test_plans_that_were_weighed() -> None:
    candidates = (
        PlanCandidate("found", "dp: auto\ntp: auto", 144.9e-3, 136.6e-3, holds=21_100_000_000),
        PlanCandidate(
            "ddp over dp, tp", "dp: batch\ntp: batch", 153.1e-3, 141.4e-3, holds=27_400_000_000, dropped="slower than what is taken"
        ),
        PlanCandidate("fsdp+megatron", "", 236.1e-3, holds=18e9, dropped="slower than what is taken"),
        PlanCandidate("ulysses", "", dropped="ulysses needs more\n  what to do: less"),
    )
    assert_expected_inline(plan_candidates_table(candidates), """\
weighed for the plan: 4 candidates
  candidate        by the model    by the clock    a rank holds
  ---------------  --------------  --------------  --------------  -------------------------
  found            144.9 ms        136.6 ms        21.1 GB         taken
  ddp over dp, tp  153.1 ms        141.4 ms        27.4 GB         slower than what is taken
  fsdp+megatron    236.1 ms                        about 18.0 GB   slower than what is taken
  ulysses                                                          ulysses needs more
""")
    assert plan_candidates_table(()) == ""
