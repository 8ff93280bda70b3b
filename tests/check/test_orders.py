"""In which order values lie is part of their types: each line that says another is refused, and so is who reads the wrong one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from meshc import artifact, rules
from meshc.check import check_program, sharding_walk
from meshc.errors import ArtifactError
from meshc.files import seal
from meshc.program.program import PlainProgram
from meshc.report import summary
from meshc.text.parse import parse_stage, parse_type
from meshc.text.printer import hash_program, print_stage, print_type, side_table
from tests.broad import broad
from tests.meaning.test_orders import RING, Layers, Picks, Prefix, trained

ZIGZAG = "seq 12/cp~zigzag"


def made(between: nn.Module) -> PlainProgram:
    program = trained(Layers(between), "cp=2", RING).compiled
    assert isinstance(program, PlainProgram)
    return program


@pytest.fixture(scope="module")
def decoder() -> PlainProgram:
    return made(nn.Identity())


def lines_of(program: PlainProgram) -> list[str]:
    return print_stage(program.stages["main"], program, comments=False).split("\n")


def with_lines(program: PlainProgram, lines: list[str]) -> PlainProgram:
    stage = program.stages["main"]
    return replace(program, stages={"main": parse_stage("\n".join(lines), side_table(stage), "stages/main.py")})


def said(program: PlainProgram, lines: list[str]) -> str:
    with pytest.raises(ArtifactError) as caught:
        check_program(with_lines(program, lines), "program.json", rules)
    return str(caught.value)


def test_types_say_it_wherever_people_read_them(decoder: PlainProgram) -> None:
    assert f'addmm_default: "f64[batch 2 * {ZIGZAG}, ' in print_stage(decoder.stages["main"], decoder)
    assert f"batch 2, heads 2, {ZIGZAG}, head 8" in summary.summary(decoder)
    record = parse_type("f32[batch 2, seq 12/cp~zigzag/tp * head 3/dp]", {"cp": 2, "tp": 3, "dp": 3})
    assert not isinstance(record, tuple) and record.shape == (2, 2) and record.sharding is not None
    assert print_type(record, {"cp": 2, "tp": 3, "dp": 3}) == "f32[batch 2, seq 12/cp~zigzag/tp * head 3/dp]"
    assert record.sharding.dims[1][0].order == "zigzag" and record.sharding.split_axes() == {"cp", "tp", "dp"}


@pytest.mark.parametrize("cuts", ["/cp~", "/cp~other", "/~zigzag", "/tp/cp~zigzag", "/cp~zigzag~zigzag"])
def test_orders_have_names_and_stand_behind_the_first_axis(cuts: str) -> None:
    with pytest.raises(ArtifactError, match="is no type: .* is not /AXIS/..., or /AXIS~ORDER/... with an order of zigzag"):
        parse_type(f"f32[seq 12{cuts}]")


@pytest.mark.parametrize(
    ("between", "every"), [(nn.Identity(), 6), broad(nn.Identity(), 1), broad(Prefix(), 1), broad(Picks(), 1)],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)  # fmt: skip
def test_each_type_that_says_another_order_is_refused(between: nn.Module, every: int) -> None:
    program = made(between)
    stage, lines = program.stages["main"], lines_of(program)
    assert not list(sharding_walk.faults(stage, program.axis_sizes, rules))
    typed = [(number, found[1]) for number, line in enumerate(lines) if (found := re.match(r'    \w+: "([^"]*/cp[^"]*)"', line))]
    assert len(typed) > 50
    for number, said in typed[::every]:
        other = said.replace("/cp~zigzag", "/_").replace("/cp", "/cp~zigzag").replace("/_", "/cp")
        edited = [*lines[:number], lines[number].replace(said, other), *lines[number + 1 :]]
        assert list(sharding_walk.faults(parse_stage("\n".join(edited)), program.axis_sizes, rules)), lines[number]


def test_what_is_not_exchanged_is_told_by_its_line(decoder: PlainProgram) -> None:
    lines = lines_of(decoder)
    at = next(number for number, line in enumerate(lines) if line.strip().startswith("reshape_default:"))
    lines[at] = lines[at].replace("(to_zigzag,", "(shard,")
    told = said(decoder, lines)
    assert f"stages/main.py, line {at + 1}: reshape_default = aten.reshape(...): it is a view of [batch 2, seq 12/cp," in told


def test_programs_that_do_not_say_it_are_refused(decoder: PlainProgram, tmp_path: Path) -> None:
    """An edited text by its lines, a program of the version before orders by its version; one without orders is read."""
    told = said(decoder, [line.replace("~zigzag", "") for line in lines_of(decoder)])
    assert "dim 2 of transpose_int is [seq 12/cp]: meshc.attention_zigzag takes it in zigzag order" in told
    plain = trained(nn.Sequential(nn.Linear(16, 16)), "cp=2", RING).compiled
    assert isinstance(plain, PlainProgram)
    for name, program in (("zigzag", decoder), ("plain", plain)):
        artifact.save(program, tmp_path / name)
        assert hash_program(artifact.load(tmp_path / name, rules=rules)) == hash_program(program)
        manifest = tmp_path / name / "manifest.json"
        manifest.write_text(seal.seal_text({**json.loads(manifest.read_text()), "version": 3}))
    assert hash_program(artifact.load(tmp_path / "plain", rules=rules)) == hash_program(plain)
    with pytest.raises(ArtifactError, match="is of version 3, whose zigzag order is another one.*: compile and save the program"):
        artifact.load(tmp_path / "zigzag", rules=rules)


def test_what_enters_and_leaves_lies_in_natural_order(decoder: PlainProgram) -> None:
    record = parse_type("f32[batch 2, seq 12/cp~zigzag, heads 2 * head 8]")
    assert not isinstance(record, tuple)
    inputs = tuple(replace(port, sharding=record.sharding) if port.key == "input:x" else port for port in decoder.inputs)
    with pytest.raises(ArtifactError, match=r"input:x: it lies as \[batch 2, seq 12/cp~zigzag, .* lies in natural order"):
        check_program(replace(decoder, inputs=inputs), "program.json", rules)


X, Y = f"f32[batch 4, {ZIGZAG}]", "f32[batch 4, seq 12/cp]"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f'z: "{X}" = aten.add.Tensor(x, y)', "dim 1 of x is [seq 12/cp~zigzag] and dim 1 of y is [seq 12/cp]: aten.add.Tensor takes them"),
        (f'z: "{Y}" = aten.neg(x)', "its operator makes dim 1 [seq 12/cp~zigzag], declared is [seq 12/cp]"),
        (f'z: "{X}" = aten.cumsum(x, 1)', "dim 1 of x is [seq 12/cp~zigzag]: aten.cumsum takes it in natural order"),
        ('z: "f32[batch 4, seq 12]" = all_gather(x, ["cp"], 1)', "it gathers over cp along dim 1, which is [seq 12/cp~zigzag]"),
        ('z: "f32[4, 8]" = halo(x, ["cp"], 1, 12, [12, 1, -1, 8], 0.0)', "it reads neighbours along dim 1 of its operand"),
        (f'z: "{X}" = mask(x, 1, 6, 0.0)', "it counts positions along dim 1 of its operand"),
        (f'z: "{X}" = shard(whole, 1, 2, coordinate)', "its operand's dim 1 is [seq 12], which split over cp is not [seq 12/cp~zigzag]"),
        (f'z: "{Y}" = from_zigzag(x, ["cp"], 1)', ""),
        (f'z: "{X}" = to_zigzag(y, ["cp"], 1)', ""),
        (f'z: "{X}" = from_zigzag(x, ["cp"], 1)', "its operator makes dim 1 [seq 12/cp], declared is [seq 12/cp~zigzag]"),
        (f'z: "{Y}" = from_zigzag(y, ["cp"], 1)', "dim 1 of its operand, which is [seq 12/cp], in another order than zigzag"),
        (f'z: "{X}" = to_zigzag(x, ["cp"], 1)', "dim 1 of its operand, which is [seq 12/cp~zigzag], in another order than the natural one"),
        (f'z: "{X}" = aten.neg(x)', ""),
        (f'z: "{X}" = aten.cumsum(x, 0)', ""),
    ],
)
def test_operators_take_the_order_that_they_compute_in(line: str, why: str) -> None:
    text = f'''@ranks("cp=2")
def main(
    x: "{X}" = "input:x",
    y: "{Y}" = "input:y",
    whole: "f32[batch 4, seq 12]" = "input:whole",
):
    coordinate: "int" = coordinate("cp")
    {line}
    return {{
        "output:z": z,
    }}
'''
    found = list(sharding_walk.faults(parse_stage(text), {"cp": 2}, rules))
    assert [name for name, _ in found] == (["z"] if why else [])
    assert not why or why in found[0][1], found
