"""Experts that lie in other slots than their numbers say, on simulated ranks: a program means what it meant.
(`tests/processes/rebalance.py` moves them between real ranks.)"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.frontend.expert_placement import SLOTS, WEIGHTS
from meshc.ops.expert_slots import choices_to_slots
from meshc.optimizer.optimizer import describe, numbers
from meshc.program.program import PlainProgram
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.models import Case
from tests.zoo.experts import FAMILIES


def double(family: str, **sizes: int) -> Case:
    found = FAMILIES[family].case(family, **sizes)
    found.model.double()
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def compiled(found: Case, mesh: str, microbatches: int | None = None, **options: Any) -> meshc.Program:
    options = {"expert_placement": "movable", "seed": 0, **options}
    step = meshc.TrainStep(found.model, optimizer=adamw(found.model), loss=lambda output: output.loss, microbatches=microbatches)
    return meshc.compile(step, meshc.Mesh(mesh), options=meshc.Options(**options), kwargs=found.call_kwargs)


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


MESHES = ("ep=2", "ep=4", "dp=2,ep=2")
ORDINARY = (("mixtral", "ep=2", None, {}),)
BROAD = (
    *((family, mesh, None, {}) for family in ("mixtral", "gpt_oss", "deepseek_v3") for mesh in (*MESHES, "ep=3", "ep=2,tp=2", "pp=2,ep=2")),
    ("olmoe", "dp=2", None, {}),
    ("olmoe", "ep=2", 2, {}),
    ("olmoe", "ep=2", None, {"expert_capacity": 8.0}),
)  # fmt: skip


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


@pytest.mark.parametrize("family, mesh, microbatches, options", [*ORDINARY, *(broad(*one) for one in BROAD if one not in ORDINARY)])
def test_steps_before_and_after_equal_one_device(family: str, mesh: str, microbatches: int | None, options: dict[str, Any]) -> None:
    """A step where experts lie by number, one where they have moved, one where they have moved again: losses, what was chosen, parameters
    and Adam's state. Without a capacity nothing is dropped."""
    found = double(family, **({"num_hidden_layers": 1} if (family, mesh, microbatches, options) in ORDINARY else {}))
    twin = copy.deepcopy(found.model)
    program = compiled(found, mesh, microbatches, **options)
    values = begun(program, found)
    paths = paths_of(values)
    chosen = chosen_in(twin, values)
    losses, optimizer = trained(twin, found.call_kwargs, 3)
    generator = torch.Generator().manual_seed(1)
    for step, loss in enumerate(losses):
        for path in paths if step else ():
            slots = torch.randperm(len(values[f"buffer:{path}.{SLOTS}"]), generator=generator)
            values = back(values, path)
            values[f"buffer:{path}.{SLOTS}"] = torch.arange(len(slots))
            values = moved(values, path, slots)
        values = one_step(program.compiled, values)
        (name,) = (port.key for port in program.compiled.outputs if port.kind == "output")
        torch.testing.assert_close(values[name], loss, rtol=1e-6, atol=1e-6)
    counts = [f"metric:{word}:{path}" for word in ("dropped", "routed")[not options :] for path in paths]
    assert sorted(name for name in values if name.startswith(("metric:routed:", "metric:dropped:"))) == sorted(counts)
    for path in paths:
        assert torch.equal(values[f"metric:routed:{path}"], chosen[path])
        assert not torch.equal(values[f"buffer:{path}.{SLOTS}"], torch.arange(len(chosen[path])))
        values = back(values, path)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(values[f"parameter:{name}"], parameter.detach(), rtol=1e-5, atol=5e-6, msg=name)
        for slot in ("exp_avg", "exp_avg_sq"):
            wanted = optimizer.state[parameter][slot]
            torch.testing.assert_close(values[f"state:{name}/{slot}"], wanted, rtol=1e-5, atol=5e-6, msg=f"{name}/{slot}")


@pytest.mark.broad
def test_without_the_option_nothing_is_looked_up() -> None:
    found = double("mixtral")
    step = meshc.TrainStep(found.model, optimizer=adamw(found.model), loss=lambda output: output.loss)
    assert "slots" not in str(meshc.compile(step, meshc.Mesh("ep=2"), kwargs=found.call_kwargs)).replace("in_slots", "")
    assert not any(SLOTS in name for name, _ in found.model.named_buffers())


@pytest.mark.broad
def test_the_model_of_a_program_whose_experts_may_move_is_verified() -> None:
    found = double("mixtral")
    program = compiled(found, "ep=2")
    assert str(program).count("choices_to_slots(") == 2 and SLOTS not in " ".join(found.model.state_dict())
    assert meshc.verify(program, dtype=torch.float64).ok


def test_a_choice_of_no_expert_has_no_slot() -> None:
    choice = torch.tensor([[0, -1], [2, 1]])
    assert choices_to_slots(choice, torch.tensor([2, 0, 1])).tolist() == [[2, -1], [1, 0]]
    assert choices_to_slots(choice.int(), torch.tensor([2, 0, 1])).dtype == torch.int32


class _Reads(nn.Module):
    """A stock model, and a penalty of its own on expert 0."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss + self.model.get_parameter("model.layers.0.mlp.experts.down_proj")[0].square().sum()


def test_what_reads_an_expert_by_number_is_refused_with_its_line() -> None:
    found = double("mixtral", num_hidden_layers=1)
    model = _Reads(found.model)
    step = meshc.TrainStep(model, optimizer=adamw(model))
    with pytest.raises(meshc.CaptureError, match=r"down_proj: select.int at test_moved_experts.py:\d+") as raised:
        meshc.compile(step, meshc.Mesh("ep=2"), options=meshc.Options(experts=meshc.Experts(placement="movable")), kwargs=found.call_kwargs)
    assert "what to do: leave the option out" in str(raised.value)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"expert_placement": "moved"}, "use 'movable', or None"),
        ({"expert_placement": "movable", "expert_bound": 1.5}, "leave one of them out"),
    ],
)
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
