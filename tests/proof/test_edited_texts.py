"""Texts of programs that were edited: who runs one is told the line that is not what the traced graph says, or does not fit the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.check import check_program
from meshc.errors import ArtifactError
from meshc.ir.sharding import Sharding
from meshc.program.program import PlainProgram, TracedGraph
from meshc.proof.program_proof import prove
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage, side_table
from tests.broad import broad
from tests.golden.cases import CASES, gpt, train
from tests.meaning import test_orders as orders
from tests.meaning import test_rings as rings
from tests.models import mlp


@pytest.fixture(scope="module")
def decoder() -> PlainProgram:
    return with_traced(train(gpt(dropout=0.1), "dp=2,tp=2", clip=1.0))


def with_traced(program: meshc.Program) -> PlainProgram:
    """The program as it would be saved: with its traced graph."""
    joint = program.lowered.joint
    return replace(program.compiled, traced=TracedGraph(joint.as_stage))


def said_of(program: PlainProgram) -> str:
    """What is said of a program that was read from a text: by its checks, or else by its proof."""
    try:
        check_program(program, "program.json")
    except ArtifactError as error:
        return str(error)
    assert program.traced is not None
    proof = prove(program, program.traced.stage, program.constants)
    return "" if proof.holds else proof.failures[0].in_text(program)


def told(program: PlainProgram, change: Callable[[list[str]], None], name: str = "main") -> tuple[str, list[str]]:
    """What is said of a program of one of whose stages `change` has edited the lines, and those lines."""
    stage = program.stages[name]
    lines = print_stage(stage, program, comments=False).split("\n")
    change(lines)
    made = parse_stage("\n".join(lines), side_table(stage), f"stages/{name}.py")
    said = said_of(replace(program, stages={**program.stages, name: made}))
    assert said, "it is let through"
    return said, lines


def leave_out(lines: list[str], at: int) -> None:
    """A line is gone, and its readers read its first operand."""
    found = re.match(r"\s*(\w+): .* = [\w.]+\((\w+),", lines[at])
    assert found
    del lines[at]
    lines[at:] = [re.sub(rf"\b{found[1]}\b(?!\()", found[2], line) for line in lines[at:]]


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
    "axes exchanged": ("transpose_int:", "batch 4/dp, heads 4/tp", "batch 4/tp, heads 4/dp", "dim 0 is batch 4/dp, declared batch 4/tp"),
    "another dim split": ("mm_default_6:", "ffn 64/tp, hidden 16", "ffn 64, hidden 16/tp", "its operator gives f32[32, 16], declared is"),
    "an axis dropped": ("gelu_default:", "ffn 64/tp", "ffn 64", "its operator gives f32[2, 8, 32], declared is"),
    "an axis exchanged": ("gelu_default:", "ffn 64/tp", "ffn 64/dp", "uses the axis dp twice"),
    "a sum forgotten": ("mm_default_4:", " partial(sum: dp)", "", "it is partial over {'dp': 'sum'}, declared {}"),
    "a maximum for a sum": ("mm_default_4:", "sum: dp", "max: dp", "it is partial over {'dp': 'sum'}, declared {'dp': 'max'}"),
    "another axis owed": ("addmm_default_1:", "sum: tp", "sum: dp", "uses the axis dp twice"),
    "another reduction": ("all_reduce_1:", '"sum")', '"max")', "hidden 16] partial(sum: tp), of which this line does not make [batch"),
    "another axis reduced": ("all_reduce_1:", '["tp"]', '["dp"]', "addmm_default_1 is the traced addmm_1 as [batch 4/dp"),
    "a slice across tiles": ("slice_tensor_1:", "2, 8, 16", "2, 4, 12", "not what the rule of aten.split.Tensor writes for it"),
    "a slice of another length": ("slice_tensor_1:", "2, 8, 16", "2, 8, 15", "its operator gives f32[2, 8, 7]"),
    "a slice by a word": ("slice_tensor_1:", "2, 8, 16", '2, 8, "c"', "its operator does not take these operands"),
    "a tile of another axis": ("shard_1:", "coordinate)", "coordinate_1)", "of which this line does not make [batch 4/dp * seq 8]"),
    "a bias added twice": ("addmm_default_1:", "keep_first,", "h_0_attn_c_proj_bias,", "not what the rule of aten.addmm writes for it"),
    "the loss of one rank": ('"output:output"', "all_reduce_26", "div_tensor", "it gives output:output as f32[] partial(sum: dp, sum: tp)"),
    "another's memory": ('"parameter:h.0.ln_1.weight"', ": h_0_ln_1_weight", ": h_0_ln_2_weight", "in the memory of parameter:h.0.ln_2"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_the_line_that_lies_is_named(decoder: PlainProgram, lie: str) -> None:
    value, old, new, why = LIES[lie]
    said, lines = told(decoder, put(value, old, new))
    assert names(said, lines, value) and why in said, said


AT_OTHER_PLACES: Final = {
    "a check of other rows": ("check_index_default:", ", 0, 13, None", ", 0, 12, None", "check_index_default:", "that no reader of it has"),
    "a start on another axis": ("tile_start:", "[coordinate_1]", "[coordinate]", "where_scalar_other:", "the rule of aten.embedding"),
    "a half of a mask": ("unsqueeze_default:", "logical_and_default", "ge_scalar", "where_scalar_other:", "the rule of aten.embedding"),
    "labels of another tile": ("take_default:", "tile_start", "tile_start_1", "take_default:", "the rule of meshc.take"),
    "rows added for others": (
        "embedding_dense_backward_default_1:", "where_scalar_other_1", "dropout_backward_default_2", "embedding_dense_backward_default_1:",
        "the rule of aten.embedding_dense_backward",
    ),
    "one draw on all ranks": ("dropout_default:", "[tile_start_1, 0", "[0, 0", "getitem:", "the rule of meshc.dropout"),
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
    check_program(program, "program.json")
    stage = program.stages["after_1"]
    lines = print_stage(stage, program, comments=False).split("\n")
    at = next(number for number, line in enumerate(lines) if '= all_reduce(' in line and '["pp"]' in line)
    value, operand = re.findall(r"(\w+): .* = all_reduce\((\w+),", lines[at])[0]
    del lines[at]
    lines[at:] = [re.sub(rf"\b{value}\b(?!\()", operand, line) for line in lines[at:]]
    made = replace(program, stages={**program.stages, "after_1": parse_stage("\n".join(lines), side_table(stage), "after_1.py")})
    with pytest.raises(ArtifactError, match=r"after_1 has no such collective in its place|after_0 has no such collective in its place"):
        check_program(made, "program.json")


@pytest.fixture(scope="module")
def accumulated() -> PlainProgram:
    return with_traced(train(gpt(dropout=0.1), "dp_shard=2", clip=1.0, microbatches=2))


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
            check_program(replace(accumulated, schedule=schedule), "program.json")


def test_what_travels_with_others_is_put_together_as_it_lies(accumulated: PlainProgram) -> None:
    """Each turn of dims on the way to a collective of several values, or from there, is dropped."""
    text = print_stage(accumulated.stages["each"], accumulated, comments=False).split("\n")
    turns = [number for number, line in enumerate(text) if re.search(r': "\w+\[[\d, ]+\]" = aten.permute\(', line)]
    for at in turns:
        said, _ = told(accumulated, partial(leave_out, at=at), "each")
        assert "stages/each.py, line " in said
    assert len(turns) == 8


@pytest.mark.parametrize(
    ("gone", "operand", "reader", "why"),
    [
        ("all_reduce_1:", "addmm_default_1", "reshape_default_8:", "it is partial over {'tp': 'sum'}, declared {}"),
        ("all_reduce_4:", "sum_dim_int_list", "sub_tensor_2:", "the rule of aten._log_softmax"),
        ("all_reduce_3:", "amax_default", "sub_tensor_2:", "the rule of aten._log_softmax"),
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
    assert names(said, lines, "addmm_default_1:") and "the rule of aten.addmm" in said, said


def test_what_was_overwritten_is_not_read(decoder: PlainProgram) -> None:
    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if "adam_many_(" in line)
        lines.insert(at + 1, '    late: "f32[ffn 64/tp, hidden 16]" = aten.neg(t_default_3)')

    said, lines = told(decoder, change)
    assert names(said, lines, "late:") and "it reads t_default_3, and adam_many__default above has written in the memory of" in said, said


def test_a_later_phase_is_not_read(decoder: PlainProgram) -> None:
    stage = decoder.stages["main"]
    table = side_table(stage)
    table["mm_default_1"] = {**table["mm_default_1"], "phase": "update"}
    made = replace(decoder, stages={"main": parse_stage(print_stage(stage, decoder), table, "stages/main.py")})
    with pytest.raises(ArtifactError, match="it is of backward and reads mm_default_1, which is made in update"):
        check_program(made, "program.json")


def test_half_of_a_gradient_is_no_gradient(decoder: PlainProgram) -> None:
    """Nor does any check of types say so."""

    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if line.strip().startswith("mm_default_4:"))
        lines.insert(at + 1, '    half: "f32[hidden 16, ffn 64/tp] partial(sum: dp)" = aten.mul.Tensor(mm_default_4, 0.5)')
        lines[at + 2 :] = [line.replace("(mm_default_4", "(half") for line in lines[at + 2 :]]

    said, lines = told(decoder, change)
    assert names(said, lines, "half:") and "mm_default_4 is the traced mm_4 as" in said


def test_names_of_factors_say_nothing(decoder: PlainProgram) -> None:
    stage = decoder.stages["main"]
    text = print_stage(stage, decoder, comments=False).replace("vocab 13/tp", "words 13/tp")
    inputs, outputs = ([replace(port, sharding=renamed(port.sharding)) for port in ports] for ports in (decoder.inputs, decoder.outputs))
    made = replace(decoder, stages={"main": parse_stage(text, side_table(stage))}, inputs=tuple(inputs), outputs=tuple(outputs))
    assert not said_of(made)


def renamed(sharding: Sharding | None) -> Sharding | None:
    if sharding is None:
        return None
    dims = (tuple(replace(part, factor="words") if part.factor == "vocab" else part for part in parts) for parts in sharding.dims)
    return replace(sharding, dims=tuple(dims))


# ------------------------------------------------------------------------------------------------- keys that pass round a ring


def ring(attention: str) -> meshc.Program:
    return rings.trained(rings.Attends(is_causal=True), "cp=3", {"x": torch.randn(2, 18, 16)}, attention)


KINDS: Final[dict[str, Callable[[], meshc.Program]]] = {
    "ring": lambda: ring("ring"),
    "zigzag": lambda: ring("zigzag"),
    "bias and drops": lambda: rings.trained(rings.Biased((1, 2, 7, 7), dropout_p=0.4), "cp=3", {"x": torch.randn(3, 7, 16)}),
}


@pytest.fixture(scope="module", params=KINDS)
def ringed(request: pytest.FixtureRequest) -> PlainProgram:
    return with_traced(KINDS[request.param]())


def change_line(lines: list[str], at: int, pattern: str, new: Callable[[re.Match[str]], str]) -> None:
    before, lines[at] = lines[at], re.sub(pattern, new, lines[at], count=1)
    assert before != lines[at]


PLANTED: Final[dict[str, tuple[str, Callable[..., None]]]] = {
    "a shift dropped": (r" = ring_shift\(", leave_out),
    "a shift doubled": (r" = ring_shift\(", partial(change_line, pattern=r", 1\)", new=lambda _: ", 2)")),
    "another rank's place": (
        r" = ring_place\(", partial(change_line, pattern=r", (\d), 3\)", new=lambda found: f", {3 - int(found[1])}, 3)")
    ),
    "a ring of other ranks": (r" = ring_place\(", partial(change_line, pattern=r", 3\)", new=lambda _: ", 2)")),
    "a tile of another size": (
        r" = tile_start\(.*ring_place", partial(change_line, pattern=r"\((\d+), ", new=lambda found: f"({int(found[1]) + 3}, ")
    ),
    "another count": (
        r" = tile_count\(.*ring_place", partial(change_line, pattern=r"\((\d+), ", new=lambda found: f"({int(found[1]) - 1}, ")
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_ring_goes_round_as_it_is_written(ringed: PlainProgram, fault: str) -> None:
    """In lines where it can be. In zigzag order an attention takes no tile's start, but whose tile it is."""
    where, change = PLANTED[fault]
    lines = print_stage(ringed.stages["main"], ringed, comments=False).split("\n")
    places = [number for number, line in enumerate(lines) if re.search(where, line)]
    assert places or "attention_zigzag" in "".join(lines) and "tile" in where
    for place in places[:: max(1, len(places) // 3)]:
        told(ringed, partial(change, at=place))


# ------------------------------------------------------------------------------------------------------------ halos and padding


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        pooled = F.max_pool2d(self.first(images), 3, 2, 1)
        return F.avg_pool2d(self.last(pooled), 3, 2, 1, ceil_mode=True).mean((2, 3))


@pytest.fixture(scope="module")
def images() -> PlainProgram:
    model = Images()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy)
    inputs = {"images": torch.randn(2, 3, 16, 6), "target": torch.tensor([0, 2])}
    return with_traced(meshc.compile(step, meshc.Mesh("cp=2"), kwargs=inputs, plan="cp: height"))


WINDOW: Final = r"\[(\d+), (\d+), (-?\d+), (\d+)\]"
MOVED: Final = [
    ("halo", 6, WINDOW, lambda found: f"[{found[1]}, {found[2]}, {int(found[3]) + 1}, {found[4]}]"),
    ("halo", 6, WINDOW, lambda found: f"[{found[1]}, {found[2]}, {int(found[3]) - 1}, {found[4]}]"),
    ("halo", 6, r"\], (0.0|-inf)\)", lambda _: "], 1.0)"),
    ("halo_sum", 3, WINDOW, lambda found: f"[{found[1]}, {found[2]}, {int(found[3]) + 1}, {found[4]}]"),
    ("halo_sum", 3, WINDOW, lambda found: f"[{found[1]}, {found[2]}, {int(found[3]) - 1}, {found[4]}]"),
]


@pytest.mark.parametrize(("function", "count", "pattern", "new"), MOVED)
def test_no_halo_of_a_step_can_be_changed(
    images: PlainProgram, function: str, count: int, pattern: str, new: Callable[[re.Match[str]], str]
) -> None:
    lines = print_stage(images.stages["main"], images, comments=False).split("\n")
    halos = [number for number, line in enumerate(lines) if f" = {function}(" in line]
    assert len(halos) == count
    for at in halos:
        told(images, partial(change_line, at=at, pattern=pattern, new=new))


def test_a_mask_that_is_gone_is_told() -> None:
    """Five rows over two ranks: the sixth is none, and goes into no sum."""
    made = with_traced(train(mlp(batch=5, width=20), "dp=2", sgd=True))
    lines = print_stage(made.stages["main"], made, comments=False).split("\n")
    at = next(number for number, line in enumerate(lines) if " = mask(" in line)
    said, _ = told(made, partial(leave_out, at=at))
    assert "the uneven tiles of" in said and "nothing says that it is 0.0" in said, said


def test_what_comes_in_is_zero_where_who_gives_it_says_so() -> None:
    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if line.strip().startswith("up_bias_momentum_buffer:"))
        lines[at] = lines[at].replace('ffn 20/dp]"', 'ffn 20/dp] pad(zero: 0.0)"', 1)

    said, lines = told(with_traced(CASES["mlp zero2 uneven"]()), change)
    assert names(said, lines, "up_bias_momentum_buffer:"), said
    assert "its type says that the padding of [ffn 20/dp] is zero, which nothing says that gives state:up.bias" in said


# ------------------------------------------------------------------------------------------------- in which order values lie


@pytest.mark.parametrize(
    ("between", "every"), [(nn.Identity(), 6), broad(nn.Identity(), 1), broad(orders.Prefix(), 1), broad(orders.Picks(), 1)],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)  # fmt: skip
def test_each_type_that_says_another_order_is_refused(between: nn.Module, every: int) -> None:
    program = with_traced(orders.trained(orders.Layers(between), "cp=2", orders.RING))
    lines = print_stage(program.stages["main"], program, comments=False).split("\n")
    typed = [
        (number, found[1]) for number, line in enumerate(lines)
        if (found := re.match(r'    \w+: "([^"]*/cp[^"]*)"', line)) and "expand" not in line  # one number everywhere, in any order
    ]  # fmt: skip
    assert len(typed) > 50
    for number, text in typed[::every]:
        other = text.replace("/cp~zigzag", "/_").replace("/cp", "/cp~zigzag").replace("/_", "/cp")

        def change(lines: list[str], at: int = number, old: str = text, new: str = other) -> None:
            lines[at] = lines[at].replace(old, new)

        told(program, change)
