"""Store lines: how what a parameter needs lies, what that moves, that a step means what it meant, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import meshc
from meshc.program.program import PlainProgram
from meshc.report.summary import collectives
from tests.broad import broad
from tests.meaning.checks import one_rank
from tests.passes.place.trained import Head, adamw, captured, momentum

PAGE = (Path(__file__).parents[3] / "docs" / "plans.md").read_text()


def step(mesh: str, plan: str) -> meshc.Program:
    torch.manual_seed(0)
    model = Head()
    made = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss=F.mse_loss)
    return meshc.compile(made, meshc.Mesh(mesh), args=(torch.randn(4, 12),), kwargs={"target": torch.randn(4, 10)}, plan=plan)


def lies(program: PlainProgram, name: str) -> list[str]:
    """Tiles of a parameter and of what its optimizer keeps."""
    ports = [port for port in program.inputs if port.key == f"parameter:{name}" or port.of == name and port.shape]
    return [", ".join("/".join((str(part.size), *part.axes)) for (part,) in port.sharding.dims) for port in ports if port.sharding]


def moved(program: PlainProgram) -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for use in collectives(program):
        if use.bytes_per_rank > 16:  # more than the loss and its like
            found[use.phase, use.kind, "/".join(use.axes)] += use.bytes_per_rank
    return found


OPEN = "dp: batch\ntp: ffn"


@pytest.mark.parametrize(
    ("mesh", "plan", "expected"),
    [
        ("dp=2,tp=2", OPEN, ["10, 8/tp"] * 2),
        ("dp=2,tp=2", f"{OPEN}\nstore down.weight state: vocab/dp, _", ["10, 8/tp", "10/dp, 8/tp"]),
        ("dp=2,tp=2", f"{OPEN}\nstore down.weight: vocab/tp/dp, _", ["10/tp/dp, 8"] * 2),
        ("dp=2,tp=2", f"{OPEN}\nstore down.weight params: vocab/dp, ffn!", ["10/dp, 8", "10, 8/tp"]),
        # what a line does not speak of lies as it is used and as the store clauses say; what it speaks of does not
        ("dp=2,tp=2", "dp: batch; store params, grads, state\ntp: ffn\nstore *.weight state: _, ffn/tp/dp", ["10/dp, 8/tp", "10, 8/tp/dp"]),
        ("dp=2,tp=2", "dp: batch; store state\ntp: ffn\nstore down.weight: vocab!, ffn!", ["10, 8"] * 2),
        # sizes need not divide
        ("dp=4", "dp: batch\nstore down.weight: vocab/dp, _", ["10/dp, 8"] * 2),
        # a line says how a pinned parameter lies where the pin says how it is used
        ("dp=2,tp=2", "tp: -\npin down.weight: vocab/tp, _\nstore down.weight state: vocab/tp/dp, _", ["10/tp, 8", "10/tp/dp, 8"]),
    ],
)
def test_how_it_lies(mesh: str, plan: str, expected: list[str]) -> None:
    plan = plan.replace("vocab", "down.weight.0").replace("store *.weight", "store down.*")
    assert lies(step(mesh, plan).compiled, "down.weight") == expected


# -------------------------------------------------------------------------------------------------- the order of two axes in one dim


def test_an_axis_that_splits_the_product_comes_first() -> None:
    """10 rows over tp, then over dp: gathered over dp alone, from 3 rows a rank to 5, and the gradient goes back the same way."""
    own = moved(step("dp=2,tp=2", "dp: batch\ntp: down.weight.0\nstore down.weight: down.weight.0/tp/dp, _").compiled)
    before = moved(step("dp=2,tp=2", "dp: batch\ntp: down.weight.0").compiled)
    tiles = 2 * 3 * 8 * 4
    assert own - before == {
        ("forward", "all_gather", "dp"): tiles,
        ("backward", "all_gather", "dp"): tiles,
        ("update", "reduce_scatter", "dp"): tiles,
    }
    assert before - own == {("update", "all_reduce", "dp"): 5 * 8 * 4}


def test_axes_over_which_a_gradient_is_partial_are_one_reduce_scatter() -> None:
    """Rows over dp and tp, with tp splitting rows of the batch too: the gradient is partial over both."""
    rows = "dp: batch\ntp: batch"
    one = moved(step("dp=2,tp=2", f"{rows}\nstore down.weight: down.weight.0/dp/tp, _").compiled)
    two = moved(step("dp=2,tp=2", f"{rows}\nstore down.weight: down.weight.0/dp, ffn/tp").compiled)
    tiles = 4 * 3 * 8 * 4
    assert one["update", "reduce_scatter", "dp/tp"] == one["forward", "all_gather", "dp/tp"] == tiles
    assert {axes for _, way, axes in one if way != "all_reduce"} == {"dp/tp"}
    assert two["update", "reduce_scatter", "dp"] == 10 * 8 * 4 and two["update", "reduce_scatter", "tp"] == 5 * 8 * 4


# ------------------------------------------------------------------------------------------------------------- a step means the same


MLP = """
dp: batch
store down.weight state: vocab/dp/tp, _
store up.weight params: _, hidden/dp
store up.weight state: ffn!, hidden/tp
store *.bias grads, state: _
store middle.weight: middle.weight.0/tp/dp, _
"""
LLAMA = """
store *embed_tokens.weight params: vocab/tp, _
store *embed_tokens.weight state: vocab/dp/tp, _
store *.[qkv]_proj.weight state: _, hidden/dp
store *.down_proj.weight params: hidden/dp, _
store *norm.weight: hidden/dp
store lm_head.weight grads, state: vocab/dp/tp, _
"""
GPT2 = """
dp: batch; store params, grads, state
store transformer.wte.weight: vocab/dp/dp_shard, hidden!
store *.c_attn.weight state: hidden/dp_shard/dp, _
store *.ln_?.weight params: hidden!
"""


@pytest.mark.parametrize(
    ("kind", "mesh", "plan", "make", "microbatches"),
    [
        ("mlp", "dp=2,tp=2", MLP, adamw, 1),
        ("mlp", "dp=3", "store d*.weight: vocab/dp, _\nstore up.bias state: ffn/dp", momentum, 2),
        broad("llama", "dp=2,tp=2", LLAMA, momentum, 1),
        broad("mlp", "dp=2,tp=2", MLP, momentum, 3),
        broad("mlp", "dp=3", "zero1", momentum, 1),
        broad("llama", "dp=2,tp=2", LLAMA, adamw, 2),
        broad("llama", "pp=2,dp=2,tp=2", LLAMA, adamw, 2),
        broad("llama", "pp=2,dp=2,tp=2", LLAMA, momentum, 4),
        broad("gpt2", "dp=2,dp_shard=2", GPT2, adamw, 2),
        broad("gpt2", "dp=2,dp_shard=2", GPT2, momentum, 1),
    ],
)
def test_a_step_is_that_of_one_device(kind: str, mesh: str, plan: str, make, microbatches: int) -> None:  # type: ignore[no-untyped-def]
    report = captured(kind).verify_training(mesh, plan, make, clip=0.5, microbatches=microbatches)
    assert report.ok, report


# --------------------------------------------------------------------------------------------------------------------- what is said


def test_the_summary_says_where_each_lies() -> None:
    """Also where tiles have one shape and only their order differs."""
    plan = f"{OPEN}\nstore down.weight params: down.weight.0/dp/tp, ffn!\nstore down.weight state: down.weight.0/tp/dp, ffn!"
    table = step("dp=2,tp=2", plan).summary()
    assert plan.splitlines()[2] in table
    row = r"down.weight +1 +float32 +\[10/dp/tp, ffn 8\] +Shard\(0\), Shard\(0\) +\[10/tp/dp, ffn 8\] +\[10/tp/dp, ffn 8\] "
    assert re.search(row, table), table


def refusal(plan: str, mesh: str = "dp=2,tp=2", what: str = "step") -> str:
    with pytest.raises(meshc.PlanError) as caught:
        if what == "step":
            step(mesh, plan)
        else:
            meshc.compile(Head(), meshc.Mesh(mesh), args=(torch.randn(4, 12),), plan=plan)
    return str(caught.value)


FAULTS = {
    "store dwn.weight: ffn/tp, _": "no parameter is called 'dwn.weight'; did you mean down.weight",
    "store down.weight: ffn/tp": "down.weight has 2 dims, the line has 1",
    "store down.weight: _, heads/tp": "dim 1 of down.weight is ffn, it has no factor 'heads'",
    "store down.weight: _, ffn * ffn/tp": "dim 1 of down.weight is ffn, it has no further factor 'ffn'",
    "store down.weight: _, ffn/dp/tp/x/y": "ffn of down.weight has size 8, of which dp/tp/x leaves 1 to a rank: nothing is left for y",
    "store down.weight: _, ffn/pp": "ffn of down.weight cannot be stored split by pp, which cuts the model into stages",
}


@pytest.mark.parametrize("line", FAULTS)
def test_what_does_not_fit_the_model_is_refused(line: str) -> None:
    said = refusal(f"dp: batch\ntp: ffn\nx: -\ny: -\n{line}", "pp=1,dp=2,tp=2,x=2,y=2")
    assert f"line 5, `{line}`: {FAULTS[line]}" in said


def test_all_faults_are_said_at_once() -> None:
    lines = ["store up.weight: a, b, c", "store down.*: _, heads/tp", "store *.weight params: _, ffn/dp", "store *: _, ffn!"]
    said = refusal("\n".join([OPEN, *lines]))
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == [
        "line 3, `store up.weight", "line 4, `store down.*", "line 5, `store *.weight params", "line 6, `store *",
        "line 5, `store *.weight params",
    ]  # fmt: skip
    assert "ffn in dim 1 is split by dp in one and whole in the other" in said


def test_a_slip_in_a_second_line_about_one_weight_is_no_contradiction() -> None:
    """Under one pattern and under two."""
    for pattern in ("down.weight", "down.*t"):
        said = refusal(f"{OPEN}\nstore down.weight: _, ffn/tp/dp\nstore {pattern} state: _, fnf/dp/tp")
        assert said.splitlines()[1:] == [
            f"  line 4, `store {pattern} state: _, fnf/dp/tp`: dim 1 of down.weight is ffn, it has no factor 'fnf'"
        ]


def test_module_mode_stores_all_kinds_alike() -> None:
    said = refusal("dp: batch; store state\ntp: ffn\nstore down.weight state: _, ffn/tp/dp", what="module")
    assert "line 1, `dp: batch; store state`: it stores state split, and parameters whole" in said
    assert "line 3, `store down.weight state: _, ffn/tp/dp`: it is about state, and not about params, grads" in said
    assert "write `store down.weight: _, ffn/tp/dp`, which says it of all three" in said
    model = Head()
    program = meshc.compile(model, meshc.Mesh("dp=2,tp=2"), args=(torch.randn(4, 12),), plan=f"{OPEN}\nstore down.weight: _, ffn/tp/dp")
    meshc.verify(program)
    assert {str(port.sharding) for port in program.compiled.outputs if port.key == "gradient:down.weight"} == {
        str(port.sharding) for port in program.compiled.inputs if port.key == "parameter:down.weight"
    } == {"[down.weight.0 10, ffn 8/tp/dp]"}


def test_a_line_about_what_another_program_has_laid_is_noted() -> None:
    line = "store down.weight params: _, ffn/dp"
    with one_rank() as mesh, torch.no_grad():
        model, x = Head(), torch.randn(4, 12)
        meshc.compile(model, mesh, args=(x,))(x)
        program = meshc.compile(model, mesh, args=(x,), plan=line)
    assert [note for note in program.compiled.notes if "store" in note] == [
        f"line 1, `{line}`: down.weight lies as the program of this model that was compiled first has it"
    ]


def test_a_line_that_changes_nothing_is_noted() -> None:
    line = "store down.weight grads: _, ffn/tp/dp"
    assert [note for note in step("dp=2,tp=2", f"{OPEN}\n{line}").compiled.notes if "store" in note] == [
        f"line 3, `{line}`: no gradient outlives a TrainStep; that of down.weight goes to where the state lies at once"
    ]
