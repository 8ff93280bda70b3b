"""What a text may do with values of which the used rows alone are there."""

from __future__ import annotations

import pytest

from meshc.check import used_rows_readers
from meshc.check.stage import faults
from meshc.errors import ArtifactError
from meshc.ir.verify_graph import MalformedGraph, verify_graph
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage

HEAD = '''@ranks("tp=2")
def main(
    own: "i64[1, 4, 2]" = "input:own",
    x: "f32[4, 6]" = "input:x",
    w: "f32[3, 6, 6]" = "parameter:w",
    s: "f32[1, 8, 6]" = "input:s",
):
    both: "(i64[1, 8] used(1), i64[3])" = meshc.used_rows(own, 3)
    used: "i64[1, 8] used(1)" = getitem(both, 0)
    ends: "i64[3]" = getitem(both, 1)
    h: "f32[1, 8, 6] used(1)" = meshc.rows_of_tokens(x, used, 2)
    y: "f32[1, 8, 6] used(1)" = meshc.used_mm(h, w, ends, 0.5)
'''
OUT = 'out: "f32[4, 6]" = meshc.tokens_of_rows(y, used, 4, 2)'
SOUND = [
    'a: "f32[1, 8, 3] used(1)" = aten.slice.Tensor(y, 2, 0, 3)',
    'b: "f32[1, 8, 3, 1] used(1)" = aten.reshape(a, [1, -1, 3, 1])',
    'c: "f32[1, 8, 3, 5] used(1)" = aten.expand(b, [1, -1, 3, 5])',
    'd: "f32[1, 8, 3] used(1)" = aten.sum.dim_IntList(c, [3])',
    'e: "f32[8, 3] used(0)" = aten.reshape(d, [-1, 3])',
    'f: "f32[1, 8, 6] used(1)" = aten.cat([a, d], 2)',
    'g: "f32[1, 8, 6] used(1)" = aten.mul.Tensor(f, y)',
    'i: "f32[3, 6, 6]" = meshc.used_outer(g, y, ends, 0.5)',
]


def stage_of(*lines: str, given: str = '"output:out": out'):  # type: ignore[no-untyped-def]
    return parse_stage(HEAD + "".join(f"    {line}\n" for line in lines) + f"    return {{\n        {given},\n    }}\n")


def test_a_sound_stage_is_read_and_written_as_it_is() -> None:
    stage = stage_of(*SOUND, OUT)
    assert [*faults(stage, {"tp": 2}), *used_rows_readers.faults(stage, ())] == []
    assert print_stage(parse_stage(print_stage(stage))) == print_stage(stage)
    verify_graph(stage.graph, 4, 1, {"tp": 2})


ALONE = "and does not treat each row by itself"


@pytest.mark.parametrize(
    "line, why",
    [
        ('z: "f32[1, 8, 6]" = aten.silu(y)', "it makes used rows along dim 1, and its type says all rows"),
        ('z: "f32[1, 8, 6] used(1)" = aten.silu(s)', "its type says that its used rows alone are there, and it reads none that are so"),
        ('z: "f32[1, 8, 6] used(1)" = aten.add.Tensor(y, s)', ALONE),
        ('z: "f32[1, 1, 6]" = aten.sum.dim_IntList(y, [1], True)', ALONE),
        ('z: "f32[1, 8, 6] used(1)" = aten.cumsum(y, 1)', ALONE),
        ('z: "f32[1, 8, 6] used(1)" = aten._softmax(y, 1, False)', ALONE),
        ('z: "f32[1, 6, 8]" = aten.transpose.int(y, 1, 2)', ALONE),
        ('z: "f32[1, 4, 6]" = aten.slice.Tensor(y, 1, 0, 4)', ALONE),
        ('z: "f32[1, 8, 2, 3] used(1)" = aten.reshape(y, [1, 8, 2, 3])', ALONE),
        ('z: "f32[1, 4, 12]" = aten.reshape(y, [1, -1, 12])', ALONE),
        ('z: "f32[1, 8, 12]" = aten.cat([y, s], 2)', ALONE),
        ('z: "f32[1, 8, 6] used(1)" = all_reduce(y, ["tp"], "sum")', ALONE),
        ('z: "f32[1, 8, 6] used(1)" = mask(y, 1, 3, 0.0)', ALONE),
        ('z: "f32[1, 8, 6] used(1)" = meshc.used_mm(s, w, ends, 0.5)', "s is all rows, where its operator takes the used rows along dim 1"),
        ('z: "f32[1, 8, 6]" = meshc.rows_of_tokens(x, used, 2)', "it makes the used rows along dim 1, and its type says all rows"),
        ('z: "i64[1, 8]" = getitem(both, 0)', "its type says all rows, which what it is taken out of does not"),
    ],
)
def test_what_does_not_treat_each_row_by_itself_is_refused(line: str, why: str) -> None:
    stage = stage_of(line, OUT)
    assert [*faults(stage, {"tp": 2})] == []
    ((name, told),) = used_rows_readers.faults(stage, ())
    assert name == "z" and why in told
    with pytest.raises(MalformedGraph, match="z: "):
        verify_graph(stage.graph, 4, 1, {"tp": 2})


def test_used_rows_leave_no_rank() -> None:
    stage = stage_of(OUT, given='"output:y": y')
    assert [why for _, why in used_rows_readers.faults(stage, ())] == ["output:y leaves as y, of which the used rows alone are there"]
    kept = stage_of(OUT, given='"flow:y": y')
    assert [*used_rows_readers.faults(kept, ())] == []
    assert [name for name, _ in used_rows_readers.faults(kept, ("flow:y",))] == ["return flow:y"]


@pytest.mark.parametrize("said", ["used", "used(2)", "used(-1)", "used()", "used(1) used(1)"])
def test_a_type_names_one_of_its_dims(said: str) -> None:
    with pytest.raises(ArtifactError, match="is no type"):
        stage_of(f'z: "i64[1, 8] {said}" = getitem(both, 0)', OUT)
