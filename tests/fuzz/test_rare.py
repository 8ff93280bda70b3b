"""Plans of what is rare: an axis takes it, and the program has the operators that are for it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest

from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.text.printer import print_stage
from tests.fuzz.case import PLAIN, Case
from tests.fuzz.check import Captured
from tests.fuzz.rare import directed, rare
from tests.fuzz.sketch import Leaf, Sketch, Step

CAUSAL = "rows = torch.tanh({0})\n{out} = F.scaled_dot_product_attention(rows, rows, rows, is_causal=True)"
WRITTEN_OUT = "rows = torch.tanh({0})\n{out} = F.scaled_dot_product_attention(rows, rows, rows[..., :2])"
FEW_QUERIES = "keys = torch.tanh({1})\n{out} = F.scaled_dot_product_attention({0}, keys, keys)"
ROUTED = (
    "weight, index = ({0} @ {1}).topk(2, -1)\n"
    "gate = torch.zeros(6, 4, dtype=torch.float64).scatter(1, index, weight)\n"
    "{out} = torch.einsum('te,ten->tn', gate, torch.einsum('td,edn->ten', {0}, {2}))"
)
RECURRENT = "torch.rnn_tanh({0}, torch.zeros(1, 2, 3, dtype=torch.float64), [{1}, {2}], False, 1, 0.0, True, False, False)[0]"


def sketch(op: str, text: str, *shapes: tuple[int, ...]) -> Sketch:
    """One step of parameters of these shapes."""
    leaves = tuple(Leaf(f"p{index}", "parameter", shape, seed=index) for index, shape in enumerate(shapes))
    if "{out}" not in text:
        text = f"{{out}} = {text}"
    return Sketch(leaves, (Step(op, text, tuple(leaf.name for leaf in leaves), ("v0",)),), ("v0",))


KINDS = {
    "zigzag": (sketch("attention", CAUSAL, (2, 2, 8, 4)), "meshc.attention_zigzag("),
    "keys": (sketch("attention", FEW_QUERIES, (2, 2, 3, 4), (2, 2, 8, 4)), "meshc.attention_join("),
    "steps": (sketch("recurrent", RECURRENT, (8, 2, 5), (3, 5), (3, 3)), "meshc.rnn_turn("),
    "experts": (sketch("routed", ROUTED, (6, 5), (5, 4), (4, 5, 3)), "4/a"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_axis_takes_what_is_rare(kind: str) -> None:
    drawn, wanted = KINDS[kind]
    ready, mesh = Captured(drawn, train=False), Mesh("a=2")
    assert kind in rare(drawn, ready.placed)
    plan, how = directed(random.Random(0), drawn, ready.placed, mesh, "a: -", PLAIN)
    program = ready.program(mesh, plan, how)
    assert any(wanted in print_stage(stage, program) for stage in program.stages.values()), plan
    assert ready.check(mesh, plan, how).kind == "equal"


@pytest.mark.parametrize("text, plan, kind", [(CAUSAL, "a: seq", "equal"), (WRITTEN_OUT, "a: f0", "refused")], ids=["passes", "does not"])
def test_the_script_of_a_case_with_a_ring_does_what_the_case_did(text: str, plan: str, kind: str) -> None:
    """It asks as users do, to whom attention whose keys cannot pass round is refused."""
    drawn = Sketch((Leaf("x", "input", (2, 2, 8, 4)),), (Step("attention", text, ("x",), ("v0",)),), ("v0",))
    case = Case(drawn, False, "a=2", (plan,), replace(PLAIN, attention="ring"))
    assert Captured(drawn, train=False).check(Mesh(case.mesh), plan, case.how).kind == kind
    with pytest.raises(PlanError, match="cannot pass round") if kind == "refused" else nullcontext():
        exec(compile(case.script("a case"), "<case>", "exec"), {"__name__": "__main__"})


def test_a_program_without_any_keeps_its_plan() -> None:
    drawn = sketch("one", "torch.tanh({0})", (6, 5))
    ready = Captured(drawn, train=False)
    assert directed(random.Random(0), drawn, ready.placed, Mesh("a=2"), "a: -", PLAIN) == ("a: -", PLAIN)
