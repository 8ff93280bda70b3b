"""When copies between device and host start: text in, text out; what stays where it is; the window; what no other stage may read."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from expecttest import assert_expected_inline

from meshc.cost.devices import Link, device
from meshc.errors import CompileError
from meshc.ir.mesh import Mesh
from meshc.passes.lower.prefetch_offloaded import place_host_copies, prefetch_offloaded
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage

TEXT = """def main(
    x: "f32[512, 512]" = "input:x",
    p: "f32[512, 512] host" = "parameter:p",
    q: "f32[512, 512] host" = "parameter:q",
):
    a: "f32[512, 512]" = from_host(p)
    g: "f32[512, 512]" = aten.mm(x, a)
    h: "f32[512, 512]" = aten.mm(g, g)
    i: "f32[512, 512]" = aten.mm(h, h)
    b: "f32[512, 512]" = from_host(q)
    k: "f32[512, 512]" = aten.mm(i, b)
    return {
        "output:k": k,
    }
"""
LARGE = 1 << 30
CPU = device("cpu")


def order(text: str, host_Bps: float, limit: int = LARGE) -> str:
    """The names of what runs, in order, where a copy of 1 MiB takes that long and each product 10 us."""
    stage = parse_stage(text)
    flops = {"float32": 2 * 512**3 / 10e-6}
    on = replace(
        CPU, flops_per_s=flops, memory_Bps=1e15, launch_s=0.0, host=Link(0.0, host_Bps), efficiency=replace(CPU.efficiency, flops=1.0)
    )
    place_host_copies(stage.graph, on, limit)
    return " ".join(re.findall(r"^    (\w+): \".*?\" = (?:aten|from_host|to_host)", print_stage(stage), re.MULTILINE))


def test_a_copy_starts_as_late_as_it_can_be_done_when_it_is_read() -> None:
    mebi = 1024 * 1024
    assert_expected_inline("\n".join(order(TEXT, mebi / (microseconds * 1e-6)) for microseconds in (9, 19, 29)), """\
a g h b i k
a g b h i k
a b g h i k""")


def test_what_has_nothing_on_the_host_stays_as_it_is() -> None:
    text = TEXT.replace("from_host(p)", "aten.exp(p)").replace("from_host(q)", "aten.exp(q)").replace(" host", "")
    assert order(text, 1e3) == "a g h i b k"


def test_no_more_waits_than_a_window_holds() -> None:
    """Each is read while the next is on its way, and no other."""
    third = TEXT.replace("    return {", '    c: "f32[512, 512]" = from_host(p)\n    l: "f32[512, 512]" = aten.mm(k, c)\n    return {')
    text = third.replace('"output:k": k', '"output:l": l')
    assert order(text, 1e3) == "a b c g h i k l"
    assert order(text, 1e3, limit=1024 * 1024) == "a b g h i c k l"


def test_what_is_stored_on_the_host_is_not_sent_to_another_stage() -> None:
    text = TEXT.replace('    a: "', '    n: "f32[512, 512] host" = to_host(x)\n    a: "').replace('"output:k": k', '"hop:n": n')
    stage = parse_stage(text)
    lowered: Any = SimpleNamespace(mesh=Mesh("pp=2"), stages={"main": stage}, pipeline=SimpleNamespace(messages={(0, 1): ["hop:n"]}))
    with pytest.raises(CompileError, match=r"n at .* lies on the host by `.*`, and another pipeline stage reads it"):
        prefetch_offloaded(lowered)
