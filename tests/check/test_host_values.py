"""What a text may do with values on the host."""

from __future__ import annotations

import pytest

from meshc.check import host_values, overwrites
from meshc.check.stage import faults, may_view
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage

HEAD = '''@ranks("dp=2")
def main(
    m: "f32[8, 4] host" = "state:w/exp_avg",
    x: "f32[8, 4]" = "input:x",
):
'''


def stage_of(*lines: str, given: str = '"state:w/exp_avg": back'):  # type: ignore[no-untyped-def]
    return parse_stage(HEAD + "".join(f"    {line}\n" for line in lines) + f"    return {{\n        {given},\n    }}\n")


FETCH = 'd: "f32[8, 4]" = from_host(m)'
BACK = 'back: "f32[8, 4] host" = to_host(d, m)'


def test_a_sound_stage_is_read_and_written_as_it_is() -> None:
    stage = stage_of(FETCH, BACK)
    assert [*faults(stage, {"dp": 2}), *host_values.faults(stage), *overwrites.faults(stage, may_view)] == []
    assert print_stage(parse_stage(print_stage(stage))) == print_stage(stage)
    assert ' host" = to_host(d, m)' in print_stage(stage)


@pytest.mark.parametrize(
    "lines, given, why",
    [
        (['d: "f32[8, 4]" = aten.relu(m)', BACK], None, "its type says that it lies on the device, and it runs on the host"),
        (['d: "f32[8, 4]" = aten.mul.Tensor(x, m)', BACK], None, "it reads m, which lies on the host: from_host copies it to the device"),
        (['d: "f32[8, 4] host" = mask(m, 0, 4, 0.0)', BACK], None, "it reads m, which lies on the host: from_host copies it to the device"),
        ([FETCH, 'back: "f32[8, 4]" = to_host(d, m)'], None, "what it makes lies on the host, which its type does not say"),
        (['d: "f32[8, 4] host" = aten.relu(x)', BACK], None, "its type says that it lies on the host, and it runs on the device"),
        (['d: "f32[8, 4]" = from_host(x)', BACK], None, "it reads x, which lies on the device"),
        ([FETCH, 'back: "f32[8, 4] host" = to_host(d, x)'], None, "it reads x, which lies on the device"),
        ([FETCH, 'e: "f32[8, 4] host" = to_host(d)', 'back: "f32[8, 4] host" = to_host(d, e)'], None, "e is no place to copy to"),
        ([FETCH, 'back: "f32[8, 4] host" = to_host(d)'], '"output:y": back', "output:y leaves as back, which lies on the host"),
    ],
)
def test_only_copies_go_from_one_side_to_the_other(lines: list[str], given: str | None, why: str) -> None:
    stage = stage_of(*lines, given=given or '"state:w/exp_avg": back')
    assert [*faults(stage, {"dp": 2})] == []
    assert any(why in told for _, told in host_values.faults(stage)), list(host_values.faults(stage))


def test_an_operator_runs_where_all_that_it_reads_lies() -> None:
    stage = stage_of('h: "f32[8, 4] host" = to_host(x)', 'back: "f32[8, 4] host" = aten.add.Tensor(m, h)')
    assert [*faults(stage, {"dp": 2}), *host_values.faults(stage), *overwrites.faults(stage, may_view)] == []


def test_shapes_are_those_of_what_is_copied() -> None:
    stage = stage_of('d: "f32[8, 2]" = from_host(m)', 'back: "f32[8, 2] host" = to_host(d, m)')
    told = [why for _, why in faults(stage, {"dp": 2})]
    assert "its operator gives f32[8, 4]" in told[0] and "it copies torch.float32 [8, 2] to the place of torch.float32 [8, 4]" in told[1]


def test_what_has_been_copied_over_is_not_read_any_more() -> None:
    stage = stage_of(FETCH, BACK, 'again: "f32[8, 4]" = from_host(m)', given='"state:w/exp_avg": back, "output:y": again')
    ((name, why),) = host_values.faults(stage)
    assert name == "again" and why.endswith(": it reads m, and back above has copied over it")
