"""Experts that are modules in a loop, in other slots than their numbers say, on simulated ranks: a program means what it meant, and their
parameters stay where they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import meshc
from meshc.frontend.expert_placement import SLOTS
from meshc.optimizer.optimizer import describe, numbers
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.zoo.loops import EXPERTS, WIDTH, Model

PATHS = ("layers.0", "layers.1")
MOVES = ([3, 0, 5, 1, 4, 2], [5, 4, 3, 2, 1, 0])
CASES = [
    ("Hit", "ep=2", None),
    *(broad(kind, mesh, None) for kind in ("Hit", "All", "Masked", "One", "Places") for mesh in ("ep=3", "ep=4", "dp=2,ep=2", "ep=2,tp=2")),
    broad("Hit", "dp_shard=2,ep=2", None), broad("Hit", "ep=2", 2),
]  # fmt: skip


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)


@pytest.mark.parametrize("kind, mesh, microbatches", CASES)
def test_steps_before_and_after_equal_one_device(kind: str, mesh: str, microbatches: int | None) -> None:
    """A step where experts lie by number, one where they have moved, one where they have moved again: losses, what was chosen, parameters
    and Adam's state. The last two experts are chosen by nobody."""
    layers = 1 if (kind, mesh, microbatches) == CASES[0] else 2
    paths = PATHS[:layers]
    model = Model(kind, layers=layers, lean=1e3).double()
    twin, x = copy.deepcopy(model), torch.randn(8, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer = adamw(model)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=lambda y: y.square().mean(), microbatches=microbatches)
    program = meshc.compile(step, meshc.Mesh(mesh), args=(x,), options=meshc.Options(experts=meshc.Experts(placement="movable"), seed=0))
    spec = describe(optimizer)
    (row,) = numbers(optimizer)
    values = {f"parameter:{name}": p.detach() for name, p in model.named_parameters()} | {"input:x": x}
    values |= {f"buffer:{path}.{SLOTS}": torch.arange(EXPERTS) for path in paths}
    values |= {f"state:{name}/{slot.name}": slot.initial(p) for name, p in model.named_parameters() for slot in spec.slots_of(p)}
    values |= {f"number:0.{name}": torch.tensor(value, dtype=torch.float64) for name, value in row.items()}
    theirs = adamw(twin)
    for slots in (None, *MOVES):
        if slots is not None:
            values |= {f"buffer:{path}.{SLOTS}": torch.tensor(slots) for path in paths}
        values |= simulate(program.compiled, {port.key: values[port.key] for port in program.compiled.inputs if port.kind != "constant"})
        theirs.zero_grad()
        loss = twin(x).square().mean()
        loss.backward()
        theirs.step()
        (name,) = (port.key for port in program.compiled.outputs if port.kind == "output")
        torch.testing.assert_close(values[name], loss.detach())
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(values[f"parameter:{name}"], parameter.detach(), msg=name)
        for slot, kept in theirs.state[parameter].items():
            mine = values[f"state:{name}/{slot}"]
            torch.testing.assert_close(mine, torch.as_tensor(kept).to(mine.dtype), msg=f"{name}/{slot}")
    for path in paths:
        tokens: Tensor = values[f"metric:routed:{path}"]
        assert tokens[-2:].tolist() == [0, 0] and tokens.sum() == 48 * (1 if kind == "One" else 2)


@pytest.mark.broad
def test_a_rank_multiplies_rows_of_the_experts_that_lie_there() -> None:
    """Of a layer's weights, which all ranks have, each takes its own in the order of slots: nothing is sent for that."""
    step = meshc.TrainStep(model := Model("Hit", layers=1), optimizer=adamw(model), loss=lambda y: y.square().mean())
    options = [meshc.Options(experts=meshc.Experts(placement=placement)) for placement in (None, "movable")]
    x = torch.randn(8, 6, WIDTH)
    plain, movable = (meshc.compile(copy.deepcopy(step), meshc.Mesh("ep=2"), args=(x,), options=one) for one in options)
    assert str(movable).count("in_order(") == 2 * 4 and "in_order(" not in str(plain)
    sent = [[line.split(" = ")[1].split("(")[0] for line in str(each).splitlines() if " = all_" in line] for each in (plain, movable)]
    assert sorted(sent[0]) == sorted(sent[1])
