"""Exchanges of what is computed start where it is there, and the gradient of a matrix is made while one is on its way."""

from __future__ import annotations

import re

import pytest
from expecttest import assert_expected_inline

from meshc.passes.lower.overlap_exchanges import overlap_graph
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage


def after(text: str, sink: bool = True) -> str:
    """What each line of a stage calls, behind the pass."""
    stage = parse_stage(text)
    overlap_graph(stage.graph, sink)
    lines = re.findall(r"^    (\w+): \".*?\" = (?:aten\.|meshc\.)?(\w+)", print_stage(stage), re.MULTILINE)
    return "".join(f"{name} = {call}\n" for name, call in lines)


FORWARD = """def main(
    x: "f32[4, 8]" = "input:x",
    w: "f32[8, 2]" = "input:w",
):
    n: "f32[4, 8]" = aten.relu(x)
    r: "f32[4, 2]" = aten.mm(n, w)
    c: "f32[4, 2]" = aten.tanh(r)
    gc: "f32[8, 2]" = all_gather(c, ["dp"], 0)
    y: "f32[8, 2]" = aten.exp(gc)
    gx: "f32[8, 8]" = all_gather(n, ["dp"], 0)
    z: "f32[8, 2]" = aten.mm(gx, w)
    s: "f32[8, 2]" = aten.add.Tensor(y, z)
    return {
        "output:s": s,
    }
"""


def test_a_gather_starts_where_its_operand_is() -> None:
    assert_expected_inline(
        after(FORWARD),
        """\
n = relu
gx = all_gather
r = mm
c = tanh
gc = all_gather
y = exp
z = mm
s = add
""",
    )


def test_not_past_many_products_nor_of_what_is_stored() -> None:
    far = FORWARD.replace("    c: ", "".join(f'    r{i}: "f32[4, 2]" = aten.mm(n, w)\n' for i in (1, 2)) + "    c: ")
    assert "y = exp\ngx = all_gather\n" in after(far)
    stored = FORWARD.replace("all_gather(n,", "all_gather(x,")
    assert "y = exp\ngx = all_gather\n" in after(stored)


HALF = '    half: "f32[4, 8]" = aten.mul.Tensor(n, 0.5)\n'


def test_what_is_made_for_an_exchange_alone_goes_along() -> None:
    text = FORWARD.replace("all_gather(n,", "all_gather(half,").replace("    gx: ", HALF + "    gx: ")
    assert after(text).startswith("n = relu\nhalf = mul\ngx = all_gather\nr = mm\n")


BACKWARD = """def main(
    x: "f32[4, 8]" = "input:x",
    g: "f32[4, 6]" = "input:g",
    w: "f32[6, 8]" = "input:w",
):
    dy: "f32[4, 6]" = aten.relu(g)
    t: "f32[6, 4]" = aten.t(dy)
    dw: "f32[6, 8]" = aten.mm(t, x)
    v: "f32[8, 6]" = aten.t(dw)
    dx: "f32[4, 8]" = aten.mm(dy, w)
    r: "f32[4, 8]" = all_reduce(dx, ["tp"], "sum")
    z: "f32[4, 8]" = aten.exp(r)
    return {
        "output:z": z,
        "output:v": v,
    }
"""


MORE = '    m: "f32[4, 12]" = aten.mm(dy, u)\n'


def backward(text: str, sink: bool = True) -> str:
    stage = parse_stage(text, {name: {"phase": "backward"} for name in re.findall(r"(?m)^    (\w+): .* = \w+\S*\(", text)})
    overlap_graph(stage.graph, sink)
    return " ".join(node.name for node in stage.graph.nodes if node.op == "call_function")


def test_the_gradient_of_a_matrix_is_made_behind_an_exchange() -> None:
    assert backward(BACKWARD) == "dy t dx r dw v z"


@pytest.mark.parametrize(
    ("text", "sink"),
    [
        (BACKWARD, False),  # a budget is to be kept
        (BACKWARD.replace("aten.t(dy)", "aten.t(g)"), True),
        (BACKWARD.replace("    z: ", MORE + "    z: ").replace("    w: ", '    u: "f32[6, 12]" = "input:u",\n    w: '), True),
    ],
    ids=["budget", "another operand", "enough to do"],
)
def test_it_stays(text: str, sink: bool) -> None:
    names = backward(text, sink).split()
    assert names.index("dw") < names.index("dx") < names.index("r")
