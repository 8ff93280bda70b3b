"""Experts that lie in other slots than their numbers say, and on several ranks, on simulated ranks: rows go to where they lie, are divided
over copies, and a program means what it meant. (`tests/processes/rebalance.py` moves and copies them between real ranks.)"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.check import check_program
from meshc.frontend.expert_placement import COPIES, SLOTS, WEIGHTS
from meshc.ops.expert_copies import added_copies, choices_to_places, copies_of
from meshc.ops.expert_slots import choices_to_slots
from meshc.optimizer.optimizer import describe, numbers
from meshc.program.program import PlainProgram
from meshc.report import summary
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.models import Case
from tests.zoo.experts import FAMILIES
from tests.zoo.loops import EXPERTS, WIDTH, Model


def double(family: str, **sizes: int) -> Case:
    found = FAMILIES[family].case(family, **sizes)
    found.model.double()
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def compiled(found: Case, mesh: str, microbatches: int | None = None, **asked: Any) -> meshc.Program:
    step = meshc.TrainStep(found.model, optimizer=adamw(found.model), loss=lambda output: output.loss, microbatches=microbatches)
    options = meshc.Options(experts=meshc.Experts(placement="movable", **asked), seed=0)
    return meshc.compile(step, meshc.Mesh(mesh), options=options, kwargs=found.call_kwargs)


def begun(program: meshc.Program, found: Case) -> dict[str, Tensor]:
    """What a first step takes, whole, by key."""
    assert program.step is not None
    values = {f"parameter:{name}": p.detach() for name, p in found.model.named_parameters()}
    values |= {f"buffer:{name}": b for name, b in found.model.named_buffers()}
    values |= {f"input:{name}": value for name, value in found.call_kwargs.items() if isinstance(value, Tensor)}
    for name, p in found.model.named_parameters():
        slots = describe(program.step.optimizers).slots_of(p)
        values |= {f"state:{name}/{slot.name}": slot.initial(p) for slot in slots}
    (row,) = numbers(program.step.optimizers)
    return values | {f"number:0.{name}": torch.tensor(value, dtype=torch.float64) for name, value in row.items()}


def one_step(spec: PlainProgram, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return values | simulate(spec, {p.key: values[p.key] for p in spec.inputs if p.kind != "constant"})


def moved(values: dict[str, Tensor], path: str, slots: Tensor) -> dict[str, Tensor]:
    """Expert i of those at `path`, which lie where their numbers say, comes to lie in slots[i]: rows of parameters and of their state."""
    key = f"buffer:{path}.{SLOTS}"
    assert torch.equal(values[key], torch.arange(len(slots)))
    return values | {key: slots} | {name: values[name][slots.argsort()] for name in rows_of(values, path)}


def back(values: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    slots = values[f"buffer:{path}.{SLOTS}"]
    return values | {name: values[name][slots] for name in rows_of(values, path)}


def rows_of(values: dict[str, Tensor], path: str) -> list[str]:
    pattern = rf"(parameter|state):{re.escape(path)}\.({'|'.join(WEIGHTS)})(/exp_avg|/exp_avg_sq)?"
    return [name for name in values if re.fullmatch(pattern, name)]


def trained(model: nn.Module, inputs: dict[str, Any], steps: int) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """One device, experts called one by one."""
    model.config._experts_implementation = "eager"  # type: ignore[union-attr]  # torch's products of runs know no float64
    optimizer, losses = adamw(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, optimizer


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


def paths_of(values: Mapping[str, Tensor]) -> list[str]:
    """Of experts that may be moved."""
    return [key.removeprefix("buffer:").removesuffix(f".{SLOTS}") for key in values if key.endswith(SLOTS)]


def chosen_in(twin: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By path how often each expert was chosen in the last call of the model."""
    chosen: dict[str, Tensor] = {}
    for path in paths_of(values):
        count = len(values[f"buffer:{path}.{SLOTS}"])
        twin.get_submodule(path).register_forward_pre_hook(
            lambda _, args, path=path, count=count: chosen.update({path: args[1].flatten().bincount(minlength=count)})
        )
    return chosen


MESHES = ("ep=2", "ep=4", "dp=2,ep=2")


def rows() -> Iterator[Any]:
    """The family, the mesh, places for copies on a rank (0: experts only move), what else is asked of `Experts`, microbatches."""
    yield from (("mixtral", "ep=2", copies, {}, None) for copies in (0, 1))
    for family in ("mixtral", "gpt_oss", "deepseek_v3"):
        meshes = [(mesh, copies) for copies in (0, 1) for mesh in (*MESHES, "ep=3")] + [(mesh, 0) for mesh in ("ep=2,tp=2", "pp=2,ep=2")]
        yield from (broad(family, mesh, copies, {}, None) for mesh, copies in meshes if (family, mesh) != ("mixtral", "ep=2"))
    yield broad("olmoe", "dp=2", 0, {}, None)
    yield from (broad("olmoe", mesh, 2, {}, None) for mesh in ("ep=3", "ep=2,tp=2", "dp_shard=2,ep=2", "pp=2,ep=2"))
    for copies in (0, 1):
        yield broad("olmoe", "ep=2", copies, {}, 2)
        yield broad("olmoe", "ep=2", copies, {"capacity": 8.0}, None)


@pytest.mark.parametrize("family, mesh, copies, asked, microbatches", [*rows()], ids=str)
def test_steps_before_and_after_equal_one_device(
    family: str, mesh: str, copies: int, asked: dict[str, Any], microbatches: int | None
) -> None:
    """Three steps: experts lie by number; they have copies, or else have moved; they have moved (again), and others have copies. Losses,
    what was chosen, parameters and Adam's state. Without a capacity nothing is dropped."""
    found = double(family, **({"num_hidden_layers": 1} if (family, mesh) == ("mixtral", "ep=2") else {}))
    if copies:
        skewed(found)
    twin = copy.deepcopy(found.model)
    program = compiled(found, mesh, microbatches, copies=copies, **asked)
    check_program(program.compiled, "the program")  # as it is when it is loaded
    values = begun(program, found)
    paths = paths_of(values)
    chosen = chosen_in(twin, values)
    losses, optimizer = trained(twin, found.call_kwargs, 3)
    generator = torch.Generator().manual_seed(1)
    for step, loss in enumerate(losses):
        for path in paths if step else ():
            if step == 2 or not copies:
                slots = torch.randperm(len(values[f"buffer:{path}.{SLOTS}"]), generator=generator)
                by_number = {f"buffer:{path}.{SLOTS}": torch.arange(len(slots))}
                values = moved(back(values, path) | by_number, path, slots)
            if copies:
                values = copied(values, path, int(mesh[-1]), generator)
                assert (values[f"buffer:{path}.{COPIES}"] >= 0).sum() > 0
        values = one_step(program.compiled, values)
        (name,) = (port.key for port in program.compiled.outputs if port.kind == "output")
        torch.testing.assert_close(values[name], loss, rtol=1e-6, atol=1e-6)
    counts = [f"metric:{word}:{path}" for word in ("dropped", "routed")[not asked :] for path in paths]
    assert sorted(name for name in values if name.startswith(("metric:routed:", "metric:dropped:"))) == sorted(counts)
    for path in paths:
        assert torch.equal(values[f"metric:routed:{path}"], chosen[path])
        assert copies or not torch.equal(values[f"buffer:{path}.{SLOTS}"], torch.arange(len(chosen[path])))
        if copies:
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
def test_without_the_option_nothing_is_looked_up() -> None:
    found = double("mixtral")
    step = meshc.TrainStep(found.model, optimizer=adamw(found.model), loss=lambda output: output.loss)
    assert "slots" not in str(meshc.compile(step, meshc.Mesh("ep=2"), kwargs=found.call_kwargs)).replace("in_slots", "")
    assert not any(SLOTS in name for name, _ in found.model.named_buffers())


def test_a_choice_of_no_expert_has_no_slot() -> None:
    choice = torch.tensor([[0, -1], [2, 1]])
    assert choices_to_slots(choice, torch.tensor([2, 0, 1])).tolist() == [[2, -1], [1, 0]]
    assert choices_to_slots(choice.int(), torch.tensor([2, 0, 1])).dtype == torch.int32


class _Penalty(nn.Module):
    """A stock model, and a penalty of its own on expert 0."""

    def __init__(self, model: nn.Module, joined: bool) -> None:
        super().__init__()
        self.model, self.joined = model, joined

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        weights = self.model.get_parameter("model.layers.0.mlp.experts.down_proj")
        weights = torch.cat([weights, weights], 1) if self.joined else weights
        return loss + weights[0].square().sum()


@pytest.mark.parametrize(
    "joined, copies, said",
    [(False, 0, r"down_proj: select.int at test_placed_experts.py:\d+"), broad(True, 1, "weights of experts that are read beside")],
)
def test_what_reads_an_expert_by_number_is_refused_with_its_line(joined: bool, copies: int, said: str) -> None:
    found = double("mixtral", num_hidden_layers=1)
    model = _Penalty(found.model, joined)
    step = meshc.TrainStep(model, optimizer=adamw(model))
    options = meshc.Options(experts=meshc.Experts(placement="movable", copies=copies))
    with pytest.raises(meshc.CaptureError, match=said) as raised:
        meshc.compile(step, meshc.Mesh("ep=2"), options=options, kwargs=found.call_kwargs)
    assert "what to do: leave the option out" in str(raised.value)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"expert_placement": "moved"}, "use 'movable', or None"),
        ({"expert_placement": "movable", "expert_bound": 1.5}, "leave one of them out"),
        ({"expert_copies": 1}, r'what to do: Options\(expert_placement="movable", expert_copies=1\)'),
        ({"expert_copies": -1, "expert_placement": "movable"}, r'what to do: Options\(expert_placement="movable", expert_copies=1\)'),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(meshc.PlanError, match=said):
        meshc.Options(**options)


def test_models_without_experts_that_can_be_moved_are_refused() -> None:
    options = meshc.Options(experts=meshc.Experts(placement="movable"))
    with pytest.raises(meshc.PlanError, match="no stock experts whose weights are stacked"):
        meshc.compile(nn.Linear(4, 4), meshc.Mesh("dp=2"), args=(torch.randn(4, 4),), options=options)
    found = double("mixtral")
    first, second = (found.model.get_submodule(f"model.layers.{i}.mlp.experts") for i in range(2))
    second.down_proj = first.down_proj
    with pytest.raises(meshc.PlanError, match="have one parameter as their down_proj"):
        compiled(found, "ep=2")


def test_without_a_process_group_nothing_moves() -> None:
    with pytest.raises(meshc.StateError, match="without a process group"):
        compiled(double("mixtral"), "ep=2").rebalance({})


@pytest.mark.broad
def test_without_copies_the_program_is_that_of_experts_that_move() -> None:
    texts = [str(compiled(double("mixtral"), "ep=2", **options)) for options in ({}, {"copies": 0})]
    assert texts[0] == texts[1] and "copies" not in texts[0]


@pytest.mark.broad
def test_what_is_sent_for_copies_is_the_formula() -> None:
    """Beside what a program without sends: on two ranks with a place each, two rows of each weight into a reduce-scatter, of which a rank
    sends half, and as many out of a gather of gradients."""
    found = double("mixtral")
    sent = []
    for copies in (0, 1):
        program = compiled(found, "ep=2", copies=copies)
        sent.append(Counter[str]())
        for use in summary.collectives(program.compiled):
            sent[-1][use.kind] += use.bytes_per_rank
    rows = sum(p[0].numel() * 8 for name, p in found.model.named_parameters() if ".experts." in name)
    assert sent[1] - sent[0] == {"reduce_scatter": 2 * rows, "all_gather": 2 * rows}
