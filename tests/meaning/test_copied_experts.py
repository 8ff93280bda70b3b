"""Experts that lie on several ranks, on simulated ranks: rows are divided over the copies, and a program means what it meant.
(`tests/processes/rebalance.py` gives and takes copies between real ranks.)"""

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc import rules
from meshc.check import check_program
from meshc.frontend.expert_placement import COPIES, SLOTS
from meshc.ops.expert_copies import added_copies, choices_to_places, copies_of
from meshc.optimizer.optimizer import describe
from meshc.report import summary
from tests.broad import broad
from tests.meaning.test_moved_experts import adamw, back, begun, chosen_in, compiled, double, moved, one_step, paths_of, trained
from tests.models import Case
from tests.zoo.loops import EXPERTS, WIDTH, Model


def skewed(found: Case) -> Case:
    """All tokens have a feature by which everybody's first choice is expert 0, and nobody's the last."""
    with torch.no_grad():
        for name, parameter in found.model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter[:, 0] = 1.0
            if re.search(r"(gate|router)\.weight$", name):
                parameter[0, 0], parameter[-1, 0] = 2.0, -2.0
    return found


def copied(values: dict[str, Tensor], path: str, ranks: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Each of the first `ranks` ranks has copies of experts of others, expert 0 among them wherever it does not lie."""
    key = f"buffer:{path}.{COPIES}"
    slots, copies = values[f"buffer:{path}.{SLOTS}"], values[key].clone()
    each = -(-len(slots) // ranks)
    for rank in range(ranks):
        others = [slot for slot in range(len(slots)) if slot // each != rank]
        drawn = [others[int(one)] for one in torch.randperm(len(others), generator=generator)[: copies.shape[1]]]
        hot = int(slots[0])
        copies[rank, : len(drawn)] = torch.tensor([hot, *(one for one in drawn if one != hot)][: len(drawn)] if hot in others else drawn)
    return values | {key: copies}


MESHES = ("ep=2", "ep=4", "dp=2,ep=2")
ORDINARY = (("mixtral", "ep=2", 2, None, 1, {}),)
BROAD = (
    *((family, mesh, int(mesh[-1]), None, 1, {}) for family in ("mixtral", "gpt_oss", "deepseek_v3") for mesh in (*MESHES, "ep=3")),
    *(("olmoe", mesh, ranks, None, 2, {}) for mesh, ranks in (("ep=3", 3), ("ep=2,tp=2", 2), ("dp_shard=2,ep=2", 2), ("pp=2,ep=2", 2))),
    ("olmoe", "ep=2", 2, 2, 1, {}),
    ("olmoe", "ep=2", 2, None, 1, {"expert_capacity": 8.0}),
)  # fmt: skip


CASES = [*ORDINARY, *(broad(*one) for one in BROAD if one not in ORDINARY)]


@pytest.mark.parametrize("family, mesh, ranks, microbatches, copies, options", CASES)
def test_steps_without_and_with_copies_equal_one_device(
    family: str, mesh: str, ranks: int, microbatches: int | None, copies: int, options: dict[str, Any]
) -> None:
    """A step without copies, one with, one in which experts have moved and others have copies: losses, what was chosen, parameters and
    Adam's state."""
    found = skewed(double(family, **({"num_hidden_layers": 1} if (family, mesh) == ("mixtral", "ep=2") else {})))
    twin = copy.deepcopy(found.model)
    program = compiled(found, mesh, microbatches, expert_copies=copies, **options)
    check_program(program.compiled, "the program", rules)  # as it is when it is loaded
    values = begun(program, found)
    paths = paths_of(values)
    chosen = chosen_in(twin, values)
    losses, optimizer = trained(twin, found.call_kwargs, 3)
    generator = torch.Generator().manual_seed(1)
    for step, loss in enumerate(losses):
        for path in paths if step else ():
            if step == 2:
                values = moved(values, path, torch.randperm(len(values[f"buffer:{path}.{SLOTS}"]), generator=generator))
            values = copied(values, path, ranks, generator)
            assert (values[f"buffer:{path}.{COPIES}"] >= 0).sum() > 0
        values = one_step(program.compiled, values)
        (name,) = (port.key for port in program.compiled.outputs if port.kind == "output")
        torch.testing.assert_close(values[name], loss, rtol=1e-6, atol=1e-6)
    for path in paths:
        assert torch.equal(values[f"metric:routed:{path}"], chosen[path])
        assert chosen[path].argmax() == 0 and chosen[path].max() >= 1.5 * chosen[path].sum() / len(chosen[path]), "it is skewed"
        values = back(values, path)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(values[f"parameter:{name}"], parameter.detach(), rtol=1e-5, atol=5e-6, msg=name)
        for slot in ("exp_avg", "exp_avg_sq"):
            wanted = optimizer.state[parameter][slot]
            torch.testing.assert_close(values[f"state:{name}/{slot}"], wanted, rtol=1e-5, atol=5e-6, msg=f"{name}/{slot}")


@pytest.mark.parametrize("kind, mesh, ranks", [broad(kind, mesh, int(mesh[-1])) for kind in ("Hit", "One") for mesh in MESHES])
def test_so_do_experts_in_a_loop(kind: str, mesh: str, ranks: int) -> None:
    model = Model(kind, lean=1e3).double()
    twin, x = copy.deepcopy(model), torch.randn(8, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=lambda y: y.square().mean())
    options = meshc.Options(experts=meshc.Experts(placement="movable", copies=1), seed=0)
    program = meshc.compile(step, meshc.Mesh(mesh), args=(x,), options=options)
    values = {f"parameter:{name}": p.detach() for name, p in model.named_parameters()} | {"input:x": x}
    values |= {f"buffer:{name}": b for name, b in model.named_buffers()}
    (row,) = meshc.optimizer.optimizer.numbers(optimizer)
    values |= {f"number:0.{name}": torch.tensor(value, dtype=torch.float64) for name, value in row.items()}
    assert not any(describe(optimizer).slots_of(p) for p in model.parameters())
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(2):
        if number:
            for path in ("layers.0", "layers.1"):
                values = copied(values, path, ranks, torch.Generator().manual_seed(0))
        values = one_step(program.compiled, values)
        theirs.zero_grad()
        twin(x).square().mean().backward()
        theirs.step()
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(values[f"parameter:{name}"], parameter.detach(), msg=name)
    assert values["metric:routed:layers.0"].numel() == EXPERTS


def test_rows_of_an_expert_are_divided_over_its_copies() -> None:
    """By hand: two groups of two slots and a place for a copy each, which are places 0 1 (2) and 3 4 (5). Slot 0 has a copy in the second
    group: every other row goes there. Slot 3 has one in the first, and so two places likewise."""
    choice = torch.tensor([[0, 1], [0, 3], [3, 2], [0, -1]])
    assert choices_to_places(choice, torch.tensor([[3], [0]]), torch.arange(4), 2).tolist() == [[0, 1], [5, 2], [4, 3], [5, -1]]
    assert choices_to_places(choice, torch.tensor([[-1], [-1]]), torch.arange(4), 2).tolist() == [[0, 1], [0, 4], [4, 3], [0, -1]]
    assert choices_to_places(choice.int(), torch.tensor([[3], [0]]), torch.arange(4), 2).dtype == torch.int32


def test_what_copies_come_to_is_added_to_their_row() -> None:
    x, copies = torch.arange(4.0).view(4, 1).requires_grad_(), torch.tensor([[3, -1], [0, 3]])
    made = copies_of(x, copies)
    assert made.squeeze(-1).tolist() == [[3.0, 0.0], [0.0, 3.0]]
    (grad,) = torch.autograd.grad(made, x, torch.tensor([[[1.0], [10.0]], [[100.0], [1000.0]]]))
    assert grad.flatten().tolist() == [100.0, 0.0, 0.0, 1001.0]
    assert added_copies(torch.ones(2, 2, 1), copies, 4).flatten().tolist() == [1.0, 0.0, 0.0, 2.0]


@pytest.mark.broad
def test_without_copies_the_program_is_that_of_experts_that_move() -> None:
    texts = [str(compiled(double("mixtral"), "ep=2", **options)) for options in ({}, {"expert_copies": 0})]
    assert texts[0] == texts[1] and "copies" not in texts[0]


@pytest.mark.broad
def test_what_is_sent_for_copies_is_the_formula() -> None:
    """Beside what a program without sends: on two ranks with a place each, two rows of each weight into a reduce-scatter, of which a rank
    sends half, and as many out of a gather of gradients."""
    found = double("mixtral")
    sent = []
    for copies in (0, 1):
        program = compiled(found, "ep=2", expert_copies=copies)
        sent.append(Counter[str]())
        for use in summary.collectives(program.compiled):
            sent[-1][use.kind] += use.bytes_per_rank
    rows = sum(p[0].numel() * 8 for name, p in found.model.named_parameters() if ".experts." in name)
    assert sent[1] - sent[0] == {"reduce_scatter": 2 * rows, "all_gather": 2 * rows}


@pytest.mark.broad
def test_a_program_whose_experts_may_have_copies_is_verified() -> None:
    found = double("mixtral")
    assert meshc.verify(compiled(found, "dp=2,ep=2", expert_copies=1), dtype=torch.float64).ok


@pytest.mark.parametrize("options", [{"expert_copies": 1}, {"expert_copies": -1, "expert_placement": "movable"}])
def test_options_that_do_not_fit(options: dict[str, Any]) -> None:
    with pytest.raises(meshc.PlanError, match=r'what to do: Options\(expert_placement="movable", expert_copies=1\)'):
        meshc.Options(**options)


class _Penalty(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        weights = self.model.get_parameter("model.layers.0.mlp.experts.down_proj")
        return loss + torch.cat([weights, weights], 1)[0].square().sum()


@pytest.mark.broad
def test_what_reads_an_expert_by_number_is_refused_all_the_same() -> None:
    found = double("mixtral")
    model = _Penalty(found.model)
    step = meshc.TrainStep(model, optimizer=adamw(model))
    with pytest.raises(meshc.CaptureError, match="weights of experts that are read beside"):
        options = meshc.Options(experts=meshc.Experts(placement="movable", copies=1))
        meshc.compile(step, meshc.Mesh("ep=2"), options=options, kwargs=found.call_kwargs)
