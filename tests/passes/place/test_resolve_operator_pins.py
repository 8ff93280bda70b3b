"""Pins of operators: what an operator does that is told, what others then do, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import meshc
from meshc.errors import PlanError
from meshc.passes.place.operator_names import named_operators
from tests.passes.place.trained import Head, adamw, captured

ENTRIES = "dp: batch\ntp: ffn\n"


def step(plan: str, mesh: str = "dp=2,tp=2") -> meshc.Program:
    torch.manual_seed(0)
    model = Head()
    made = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss, clip_grad_norm=1.0)
    return meshc.compile(made, meshc.Mesh(mesh), args=(torch.randn(4, 12),), kwargs={"target": torch.randn(4, 10)}, plan=plan)


def done(program: meshc.Program) -> dict[str, str]:
    """What axes do in each operator that has a name."""
    placed = program.lowered.placed
    decided, found = placed.require_assignment(), {}
    for name, instance in named_operators(placed).items():
        chosen = decided.chosen[instance.node]
        said = [f"{placed.names.of[instance.factor[token]]}/{'/'.join(axes)}" for token, axes in chosen.items() if axes]
        waits = {axis for want in decided.wanted[instance.node] for axis, _ in want.partial}
        found[name] = ", ".join([*said, *(f"partial/{axis}" for axis in sorted(waits))])
    return found


def test_an_operator_does_what_it_is_told_and_the_others_what_entries_say() -> None:
    plain = done(step(ENTRIES))
    assert {name: plain[name] for name in ("down/forward/mm", "down/backward/mm.2", "/forward/sub", "down.weight/update/add")} == {
        "down/forward/mm": "batch/dp, ffn/tp", "down/backward/mm.2": "batch/dp, ffn/tp", "/forward/sub": "batch/dp",
        "down.weight/update/add": "partial/tp",
    }  # fmt: skip
    told = done(step(ENTRIES + "pin op:down: -/tp\npin op:up/backward/mm: batch/tp\npin op:down.weight/update/add: -/dp/tp"))
    assert {name: what for name, what in told.items() if what != plain[name]} == {
        "down/forward/mm": "batch/dp", "down/backward/mm": "batch/dp", "down/backward/mm.2": "batch/dp",
        "up/backward/mm": "batch/tp/dp", "down.weight/update/add": "",
    }  # fmt: skip


def test_a_step_of_it_means_what_it_meant() -> None:
    plan = ENTRIES + "pin op:up/forward: batch/tp, -/dp\npin op:*/backward: batch/dp/tp"
    captured("mlp").verify_training("dp=2,tp=2", plan, adamw, clip=1.0)


def test_an_axis_that_is_searched_does_what_pins_say() -> None:
    found = step("dp: batch\ntp: auto\npin op:down/forward: ffn/tp\npin op:down/backward: -/tp")
    did = done(found)
    assert did["down/forward/mm"] == "batch/dp, ffn/tp"
    assert did["down/backward/mm"] == did["down/backward/mm.2"] == "batch/dp"
    assert "pin op:down/forward: ffn/tp" in str(found.plan)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("pin op:dwn: batch/dp", "line 3, `pin op:dwn: batch/dp`: no operator is called 'dwn'; did you mean down, down.weight?"),
        (
            "pin op:down/backward/mn: batch/dp",
            "line 3, `pin op:down/backward/mn: batch/dp`: no operator is called 'down/backward/mn'; "
            "those of down are forward/mm, backward/mm, backward/mm.2",
        ),
        (
            "pin op:down/forward: heads/dp",
            "line 3, `pin op:down/forward: heads/dp`: down/forward/mm has batch, ffn, down.weight.0: no factor 'heads'",
        ),
        (
            "pin op:down: batch[2]/dp",
            "line 3, `pin op:down: batch[2]/dp`: down/forward/mm has batch, ffn, down.weight.0: not so often the factor 'batch'",
        ),
        (
            "pin op:down/forward: partial/dp",
            "line 3, `pin op:down/forward: partial/dp`: down/forward/mm does more than add up or scale, "
            "so no sum can stay partial past it (over dp)",
        ),
        (
            "pin op:down: batch/dp\npin op:down/forward: -/dp",
            "line 3, `pin op:down: batch/dp` and line 4, `pin op:down/forward: -/dp`: "
            "in down/forward/mm dp splits batch in one and nothing in the other; keep one of the two",
        ),
        (
            "pin op:down/*/mm: batch/dp/tp\npin op:down/forward: batch/tp/dp",
            "line 3, `pin op:down/*/mm: batch/dp/tp` and line 4, `pin op:down/forward: batch/tp/dp`: "
            "in down/forward/mm dp, tp stand in another order in the other; keep one of the two",
        ),
        (
            "pin value:down: batch/dp, _\npin op:down/forward: -/dp",
            "line 3, `pin value:down: batch/dp, _` and line 4, `pin op:down/forward: -/dp`: "
            "what down/forward/mm makes is split otherwise in one than in the other; keep one of the two",
        ),
        (
            "x: -\npin op:down/forward: batch/dp/tp/x",
            "line 4, `pin op:down/forward: batch/dp/tp/x`: batch of down/forward/mm has size 4, of which dp/tp leaves 1 to a rank: "
            "nothing is left for x",
        ),
    ],
)  # fmt: skip
def test_refused(lines: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        step(ENTRIES + lines, "dp=2,tp=2,x=2" if "x:" in lines else "dp=2,tp=2")
    assert str(caught.value).splitlines()[1:] == [f"  {message}"]
