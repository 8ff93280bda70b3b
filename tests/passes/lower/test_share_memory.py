"""Whose memory values have: what the pass says, that a text keeps it, and that a text that says too much is refused by its line."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from meshc.check.consistency import storage_faults as faults
from meshc.errors import ArtifactError
from meshc.passes.lower.share_memory import share_stage_memory
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage

TEXT = """def main(
    x: "f32[4, 4]" = "input:x",
):
    mm: "f32[4, 4]" = aten.mm(x, x)
    exp: "f32[4, 4]" = aten.exp(x)
    a: "f32[16]" = aten.reshape(mm, [-1])
    b: "f32[16]" = aten.reshape(exp, [-1])
    flat: "f32[32]" = aten.cat([a, b])
    r: "f32[32]" = all_reduce(flat, ["dp"], "sum")
    total: "f32[]" = aten.sum(r)
    sin: "f32[4, 4]" = aten.sin(x)
    s: "f32[4, 4]" = all_reduce(sin, ["dp"], "sum")
    wave: "f32[4, 4]" = aten.cos(x)
    t: "f32[4, 4]" = all_reduce(wave, ["dp"], "sum")
    both: "f32[4, 4]" = aten.add.Tensor(t, wave)
    large: "f32[2048, 1024]" = aten.mm(x, x)
    u: "f32[2048, 1024]" = all_reduce(large, ["dp"], "sum")
    last: "f32[]" = aten.sum(u)
    return {
        "output:total": total,
        "output:s": s,
        "output:both": both,
        "output:last": last,
    }
"""
"""Two gradients joined for one all-reduce; one that leaves; one whose operand is read again; one of 8 MiB."""

SAID = print_stage(share_stage_memory(parse_stage(TEXT)))


def test_what_nothing_else_reads_is_written_over_and_what_does_not_leave_is_kept() -> None:
    assert [line.strip() for line in TEXT.splitlines()] == [line.strip().replace("; its parts inside, kept", "").replace("; over its operand", "").replace("; kept", "") for line in SAID.splitlines()]
    assert_expected_inline("".join(f"{line.strip()}\n" for line in SAID.splitlines() if ";" in line), """\
flat: "f32[32]; its parts inside, kept" = aten.cat([a, b])
r: "f32[32]; over its operand" = all_reduce(flat, ["dp"], "sum")
s: "f32[4, 4]; over its operand" = all_reduce(sin, ["dp"], "sum")
large: "f32[2048, 1024]; kept" = aten.mm(x, x)
u: "f32[2048, 1024]; over its operand" = all_reduce(large, ["dp"], "sum")
""")


def test_a_text_keeps_it() -> None:
    assert print_stage(parse_stage(SAID)) == SAID
    assert print_stage(share_stage_memory(parse_stage(SAID))) == SAID
    assert [*faults(parse_stage(SAID))] == []


@pytest.mark.parametrize("old, new, at, why", [
    ('t: "f32[4, 4]"', 't: "f32[4, 4]; over its operand"', "t", "that is for an all-reduce of what an operator has just made, and what nothing else reads"),
    ('sin: "f32[4, 4]"', 'sin: "f32[4, 4]; kept"', "sin", "it leaves the stage, or what lies in its memory does: the next call would write over a result"),
    ('exp: "f32[4, 4]"', 'exp: "f32[4, 4]; kept"', "exp", "that is for a product that is only reduced in place, and for a cat that has its parts inside"),
    ("; its parts inside, kept", "; kept", "flat", "its parts are not inside"),
    ("aten.sin(x)", "aten.sin(exp)", "flat", "that is for a cat of vectors, each made by reshape"),
    ("[a, b]", "[a, a]", "flat", "that is for a cat of vectors, each made by reshape"),  # it can be in one place only
    ('"output:s": s', '"output:s": r', "flat", "it leaves the stage, or what lies in its memory does"),
    ('"output:s": s', '"output:s": large', "u", "what nothing else reads, whatever lies in its memory"),
])  # fmt: skip
def test_what_would_be_overwritten_is_refused(old: str, new: str, at: str, why: str) -> None:
    assert old in SAID
    found = dict(faults(parse_stage(SAID.replace(old, new))))
    assert at in found and why in found[at]


def test_what_a_region_has_is_not_kept() -> None:
    lines = SAID.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("    flat:"))
    said = "\n".join([*lines[:place], "    with region(0):", f"    {lines[place]}", *lines[place + 1 :]])
    assert dict(faults(parse_stage(said))) == {"flat": "flat: kept, but it is in region 0, whose memory is the compiler's"}
    assert 'flat: "f32[32]; its parts inside" =' in print_stage(share_stage_memory(parse_stage(said)))


@pytest.mark.parametrize("words", ["shared", "kept, ", "kept; kept", ""])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(ArtifactError, match=r"line 5: behind a type stands what its value's memory is, its parts inside or over its operand or kept, not"):
        parse_stage(TEXT.replace('exp: "f32[4, 4]"', f'exp: "f32[4, 4]; {words}"'))
