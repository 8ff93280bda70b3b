"""In which order values lie is part of their types: each line that says another is refused, and so is who reads the wrong one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from meshc import artifact
from meshc.check import check_program
from meshc.errors import ArtifactError
from meshc.files import seal
from meshc.program.program import PlainProgram
from meshc.report import summary
from meshc.text.parse import parse_type
from meshc.text.printer import hash_program, print_stage, print_type
from tests.meaning.test_orders import RING, Layers, trained

ZIGZAG = "seq 12/cp~zigzag"


def made(between: nn.Module) -> PlainProgram:
    program = trained(Layers(between), "cp=2", RING).compiled
    assert isinstance(program, PlainProgram)
    return program


@pytest.fixture(scope="module")
def decoder() -> PlainProgram:
    return made(nn.Identity())


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


def test_programs_that_do_not_say_it_are_refused(decoder: PlainProgram, tmp_path: Path) -> None:
    """A program of the version before orders is refused, one without orders is read."""
    plain = trained(nn.Sequential(nn.Linear(16, 16)), "cp=2", RING).compiled
    assert isinstance(plain, PlainProgram)
    for name, program in (("zigzag", decoder), ("plain", plain)):
        artifact.save(program, tmp_path / name)
        assert hash_program(artifact.load(tmp_path / name)) == hash_program(program)
        manifest = tmp_path / name / "manifest.json"
        manifest.write_text(seal.seal_text({**json.loads(manifest.read_text()), "version": 3}))
    assert hash_program(artifact.load(tmp_path / "plain")) == hash_program(plain)
    with pytest.raises(ArtifactError, match="is of version 3, whose zigzag order is another one.*: compile and save the program"):
        artifact.load(tmp_path / "zigzag")


def test_what_enters_and_leaves_lies_in_natural_order(decoder: PlainProgram) -> None:
    record = parse_type("f32[batch 2, seq 12/cp~zigzag, heads 2 * head 8]")
    assert not isinstance(record, tuple)
    inputs = tuple(replace(port, sharding=record.sharding) if port.key == "input:x" else port for port in decoder.inputs)
    with pytest.raises(ArtifactError, match=r"input:x: it lies as \[batch 2, seq 12/cp~zigzag, .* lies in natural order"):
        check_program(replace(decoder, inputs=inputs), "program.json")
