"""Programs that were edited, each by one line that says what is not so: the checker names that line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

import meshc
from meshc import rules
from meshc.check import bucket_order, check_program, sharding_walk
from meshc.errors import ArtifactError
from meshc.program.program import PlainProgram
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage, side_table
from tests.golden.cases import gpt, train


@pytest.fixture(scope="module")
def decoder() -> PlainProgram:
    return train(gpt(dropout=0.1), "dp=2,tp=2", clip=1.0).compiled


def told(program: PlainProgram, change: Callable[[list[str]], None]) -> tuple[str, list[str]]:
    """What is said of a program whose lines `change` has edited, and those lines."""
    stage = program.stages["main"]
    lines = print_stage(stage, program, comments=False).split("\n")
    change(lines)
    made = replace(program, stages={"main": parse_stage("\n".join(lines), side_table(stage), "stages/main.py")})
    with pytest.raises(ArtifactError) as caught:
        check_program(made, "program.json", rules)
    return str(caught.value), lines


def names(said: str, lines: list[str], value: str) -> bool:
    """Whether the first fault is on the line that makes this value, or returns under this key."""
    number = next(number for number, line in enumerate(lines, 1) if line.strip().startswith(value))
    return said.startswith(f"stages/main.py, line {number}: ")


def put(value: str, old: str, new: str) -> Callable[[list[str]], None]:
    """Replaces text in the line of a value."""

    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if line.strip().startswith(value))
        assert old in lines[at], lines[at]
        lines[at] = lines[at].replace(old, new, 1)

    return change


LIES: Final = {
    "a factor renamed": ("mm_default:", "vocab 13/tp", "ffn 13/tp", "its operator makes dim 1 [vocab 13/tp], declared is [ffn 13/tp]"),
    "axes exchanged": ("transpose_int:", "batch 4/dp, heads 4/tp", "batch 4/tp, heads 4/dp", "its operator makes dim 0 [batch 4/dp]"),
    "another dim split": ("mm_default_6:", "ffn 64/tp, hidden 16", "ffn 64, hidden 16/tp", "its operator gives f32[32, 16], declared is"),
    "an axis dropped": ("gelu_default:", "ffn 64/tp", "ffn 64", "its operator gives f32[2, 8, 32], declared is"),
    "an axis exchanged": ("gelu_default:", "ffn 64/tp", "ffn 64/dp", "uses the axis dp twice"),
    "a sum forgotten": ("mm_default_4:", " partial(sum: dp)", "", "makes it partial(sum: dp), declared is partial over nothing"),
    "a maximum for a sum": ("mm_default_4:", "sum: dp", "max: dp", "its operator makes it partial(sum: dp), declared is partial(max: dp)"),
    "another axis owed": ("addmm_default_1:", "sum: tp", "sum: dp", "uses the axis dp twice"),
    "another reduction": ("all_reduce_1:", '"sum")', '"max")', "its operand is not partial over tp for a max: it is partial(sum: tp)"),
    "another axis reduced": ("all_reduce_1:", '["tp"]', '["dp"]', "its operand is not partial over dp for a sum"),
    "a slice across tiles": ("slice_tensor_1:", "2, 8, 16", "2, 4, 12", "it cuts positions 4 to 12 out of"),
    "a slice of another length": ("slice_tensor_1:", "2, 8, 16", "2, 8, 15", "its operator gives f32[2, 8, 7]"),
    "a slice by a word": ("slice_tensor_1:", "2, 8, 16", '2, 8, "c"', "its operator does not take these operands"),
    "a tile of another axis": ("shard_1:", "coordinate)", "coordinate_1)", "dim 0 is [batch 4 * seq 8], which split over tp is not"),
    "a bias added twice": ("addmm_default_1:", "keep_first,", "h_0_attn_c_proj_bias,", "is added on each rank to its part of a sum"),
    "the loss of one rank": ('"output:output"', "all_reduce_26", "div_tensor", "it gives output:output as f32[] partial(sum: dp, sum: tp)"),
    "another's memory": ('"parameter:h.0.ln_1.weight"', ": h_0_ln_1_weight", ": h_0_ln_2_weight", "in the memory of parameter:h.0.ln_2"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_the_line_that_lies_is_named(decoder: PlainProgram, lie: str) -> None:
    value, old, new, why = LIES[lie]
    said, lines = told(decoder, put(value, old, new))
    assert names(said, lines, value) and why in said, said


AT_OTHER_PLACES: Final = {
    "a check of other rows": ("check_index_default:", ", 0, 13, None", ", 0, 12, None", "check_index_default:", "it lets 0 to 11 through"),
    "a start on another axis": ("tile_start:", "[coordinate_1]", "[coordinate]", "embedding_default:", "mul_tensor is no place in a rank"),
    "a half of a mask": ("unsqueeze_default:", "logical_and_default", "ge_scalar", "where_scalar_other:", "does not say where that is"),
    "labels of another tile": ("take_default:", "tile_start", "tile_start_1", "take_default:", "is the start of a tile of 4 over dp"),
    "rows added for others": (
        "embedding_dense_backward_default_1:", "where_scalar_other_1", "dropout_backward_default_2", "embedding_dense_backward_default_1:",
        "it adds what dropout_backward_default_2 has for rows of other ranks",
    ),
    "one draw on all ranks": ("dropout_default:", "[tile_start_1, 0", "[0, 0", "dropout_default:", "0 is not where a rank's 2 of 4"),
}  # fmt: skip


@pytest.mark.parametrize("lie", AT_OTHER_PLACES)
def test_what_goes_by_another_rank_s_place_is_named(decoder: PlainProgram, lie: str) -> None:
    value, old, new, where, why = AT_OTHER_PLACES[lie]
    said, lines = told(decoder, put(value, old, new))
    assert names(said, lines, where) and why in said, said


def test_stages_make_their_collectives_together() -> None:
    """The gradient's norm is summed over the ranks of a pipeline: without it on one of them the others would wait for good."""
    options = meshc.Options(pipeline=meshc.Pipelining(schedule="1f1b"))
    program = train(gpt(dropout=0.1), "pp=2", clip=1.0, sgd=True, microbatches=2, options=options).compiled
    check_program(program, "program.json", rules)
    stage = program.stages["after_1"]
    lines = print_stage(stage, program, comments=False).split("\n")
    at = next(number for number, line in enumerate(lines) if '= all_reduce(' in line and '["pp"]' in line)
    value, operand = re.findall(r"(\w+): .* = all_reduce\((\w+),", lines[at])[0]
    del lines[at]
    lines[at:] = [re.sub(rf"\b{value}\b(?!\()", operand, line) for line in lines[at:]]
    made = replace(program, stages={**program.stages, "after_1": parse_stage("\n".join(lines), side_table(stage), "after_1.py")})
    with pytest.raises(ArtifactError, match=r"after_1 has no such collective in its place|after_0 has no such collective in its place"):
        check_program(made, "program.json", rules)


@pytest.fixture(scope="module")
def accumulated() -> PlainProgram:
    return train(gpt(dropout=0.1), "dp_shard=2", clip=1.0, microbatches=2).compiled


def test_each_microbatch_counts_once(accumulated: PlainProgram) -> None:
    steps = accumulated.schedule
    add = next(step for step in steps if step.op == "add" and step.microbatch == 1)
    other = tuple(replace(step, microbatch=0) if step.op == "run" and step.microbatch == 1 else step for step in steps)
    for schedule, why in (
        (tuple(step for step in steps if step is not add), f"the schedule leaves {add.value}, which nothing takes"),
        (tuple(step for step in steps if (step.op, step.microbatch) != ("add", 0)), "the schedule runs each once more before part:"),
        (other, "the schedule runs each of microbatch 0 2 times; it gives parts of sums, of each one"),
    ):
        with pytest.raises(ArtifactError, match=why):
            check_program(replace(accumulated, schedule=schedule), "program.json", rules)


def test_what_travels_with_others_is_put_together_as_it_lies(accumulated: PlainProgram) -> None:
    """Each turn of dims on the way to a collective of several values, or from there, is dropped."""
    stage, found = accumulated.stages["each"], []
    assert list(bucket_order.faults(stage, accumulated.axis_sizes)) == []
    text = print_stage(stage, accumulated, comments=False).split("\n")
    turns = [number for number, line in enumerate(text) if re.search(r': "\w+\[[\d, ]+\]" = aten.permute\(', line)]
    for at in turns:
        turned, operand = re.findall(r"(\w+): .* = aten.permute\((\w+), ", text[at])[0]
        lines = [re.sub(rf"\b{turned}\b(?!\()", operand, line) for line in text[:at] + text[at + 1 :]]
        found.append(list(bucket_order.faults(parse_stage("\n".join(lines), side_table(stage)), accumulated.axis_sizes)))
    assert len(turns) == 8 and all(len(told) == 1 and "its elements do not lie in the order of" in told[0][1] for told in found), found


@pytest.mark.parametrize(
    ("gone", "operand", "reader", "why"),
    [
        ("all_reduce_1:", "addmm_default_1", "reshape_default_8:", "makes it partial(sum: tp), declared is partial over nothing"),
        ("all_reduce_4:", "sum_dim_int_list", "log_default:", "sum_dim_int_list is partial(sum: tp), which aten.log does not let through"),
        ("all_reduce_3:", "amax_default", "sub_tensor_2:", "makes it partial(min: tp), declared is partial over nothing"),
    ],
)
def test_a_reduction_that_is_gone_is_told_where_its_sum_is_read(
    decoder: PlainProgram, gone: str, operand: str, reader: str, why: str
) -> None:
    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if line.strip().startswith(gone))
        del lines[at]
        lines[at:] = [re.sub(rf"\b{gone[:-1]}\b", operand, line) for line in lines[at:]]

    said, lines = told(decoder, change)
    assert names(said, lines, reader) and why in said, said


def test_what_all_ranks_keep_is_no_part_of_a_sum(decoder: PlainProgram) -> None:
    """A bias that each rank adds: of the line that keeps it no type says so."""

    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if line.strip().startswith("keep_first:"))
        lines[at] = re.sub(r", \w+\)$", ", 0)", lines[at])

    said, lines = told(decoder, change)
    assert names(said, lines, "addmm_default_1:") and "keep_first is added on each rank to its part of a sum over tp" in said, said


def test_what_was_overwritten_is_not_read(decoder: PlainProgram) -> None:
    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if "adam_many_(" in line)
        lines.insert(at + 1, '    late: "f32[ffn 64/tp, hidden 16]" = aten.neg(t_default_3)')

    said, lines = told(decoder, change)
    assert names(said, lines, "late:") and "it reads t_default_3, and adam_many__default above has written in the memory of" in said, said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('y: "f32[batch 4, ffn 8/tp]" = all_gather(x, ["tp"], 0)', "it gathers over tp along dim 0, which is [batch 4/dp]"),
        ('y: "f32[batch 4/dp, ffn 8]" = all_gather(x, ["dp"], 1)', "it gathers over dp along dim 1, which is [ffn 8/tp]"),
        ('y: "f32[batch 4, f 8/tp]" = all_gather(x, ["dp"], 0)', "its operator makes dim 1 [ffn 8/tp], declared is [f 8/tp]"),
        ('y: "f32[b 4, ffn 8/tp]" = all_gather(x, ["dp"], 0)', "dim 0 is [batch 4/dp], which without dp is not [b 4]"),
    ],
)
def test_a_value_is_gathered_over_the_axes_that_split_it(line: str, why: str) -> None:
    text = f'''@ranks("dp=2,tp=2")
def main(
    x: "f32[batch 4/dp, ffn 8/tp]" = "input:x",
):
    {line}
    return {{
        "output:y": y,
    }}
'''
    ((name, said),) = sharding_walk.faults(parse_stage(text), {"dp": 2, "tp": 2}, rules)
    assert name == "y" and why in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('y: "f32[ffn 6/tp]" = aten.slice.Tensor(x, 0, 1, 6, 2)', ""),
        ('y: "f32[two 6/tp]" = aten.slice.Tensor(x, 0, 1, 6, 2)', "its operator makes dim 0 [ffn 6/tp], declared is [two 6/tp]"),
        ('y: "f32[ffn 4/tp]" = aten.slice.Tensor(x, 0, 1, 6, 3)', "it cuts positions 1 to 3 in steps of 3 out of [ffn 6/tp * two 2]"),
        ('y: "f32[ffn 4/tp]" = aten.slice.Tensor(x, 0, 2, 6, 2)', "it cuts positions 2 to 4 in steps of 2 out of [ffn 6/tp * two 2]"),
    ],
)
def test_every_other_position_of_a_split_dim_is_taken_where_it_is_made_of_twos(line: str, why: str) -> None:
    text = f'''@ranks("tp=2")
def main(
    x: "f32[ffn 6/tp * two 2]" = "input:x",
):
    {line}
    return {{
        "output:y": y,
    }}
'''
    found = list(sharding_walk.faults(parse_stage(text), {"tp": 2}, rules))
    assert [name for name, _ in found] == (["y"] if why else []) and all(why in said for _, said in found), found


def test_a_later_phase_is_not_read(decoder: PlainProgram) -> None:
    stage = decoder.stages["main"]
    table = side_table(stage)
    table["mm_default_1"] = {**table["mm_default_1"], "phase": "update"}
    made = replace(decoder, stages={"main": parse_stage(print_stage(stage, decoder), table, "stages/main.py")})
    with pytest.raises(ArtifactError, match="it is of backward and reads mm_default_1, which is made in update"):
        check_program(made, "program.json", rules)


def test_a_line_that_is_written_in_takes_the_phase_of_what_it_reads(decoder: PlainProgram) -> None:
    """Half of a gradient is no lie of types: `verify` finds it."""
    stage = decoder.stages["main"]
    lines = print_stage(stage, decoder, comments=False).split("\n")
    at = next(number for number, line in enumerate(lines) if line.strip().startswith("mm_default_4:"))
    lines.insert(at + 1, '    half: "f32[hidden 16, ffn 64/tp] partial(sum: dp)" = aten.mul.Tensor(mm_default_4, 0.5)')
    lines[at + 2 :] = [line.replace("(mm_default_4", "(half") for line in lines[at + 2 :]]
    check_program(replace(decoder, stages={"main": parse_stage("\n".join(lines), side_table(stage))}), "program.json", rules)


def test_values_without_elements_are_followed() -> None:
    """Nothing is divided by their extents."""
    empty = """@ranks("dp=2")
def main(
    x: "f32[batch 0/dp, width 6]" = "input:x",
):
    y: "f32[batch 0/dp, 2, 3]" = aten.reshape(x, [0, 2, 3])
    z: "f32[0, 6]" = aten.reshape(x, [0, 6])
    s: "f32[0, 3]" = aten.slice.Tensor(x, 1, 0, 3)
    return {
        "output:x": x,
    }
"""
    stage = parse_stage(empty.replace('"f32[batch 0/dp, 2, 3]"', '"f32[batch 0/dp, a 2, b 3]"'))
    assert list(sharding_walk.faults(stage, {"dp": 2}, rules)) == []
