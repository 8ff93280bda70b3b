"""`Experts(capacity=)`: the same choices are dropped on every mesh, in microbatches, and on one device; what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshc
from meshc.frontend.expert_load import with_loads
from meshc.ops.capacity import counts_of_rows, first_choices, heaviest_choices
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.models import Case
from tests.zoo.experts import FAMILIES, shallow


def compiled(found: Case, mesh: str, microbatches: int | None = None, plan: str | None = None, **options: Any) -> meshc.Program:
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(found.model, optimizer=optimizer, loss=lambda output: output.loss, microbatches=microbatches)
    said: Any = {} if plan is None else {"plan": plan}
    return meshc.compile(step, meshc.Mesh(mesh), options=meshc.Options(**options), kwargs=found.call_kwargs, **said)


def by_hand(choice: Tensor, order: list[list[int]], capacity: int) -> list[list[int]]:
    """What is taken of choices [b, n], asked in this order, one at a time."""
    found = choice.tolist()
    for row, places in enumerate(order):
        taken: dict[int, int] = {}
        for place in places:
            expert = int(choice[row, place])
            taken[expert] = taken.get(expert, 0) + 1
            if taken[expert] > capacity:
                found[row][place] = -1
    return found


def told(program: meshc.Program) -> dict[str, Tensor]:
    """Loss and metrics of a step on simulated ranks."""
    model, spec = program.asked.module, program.compiled
    values = {f"parameter:{name}": p.detach() for name, p in model.named_parameters()}
    values |= {f"buffer:{name}": b for name, b in model.named_buffers()}
    values |= {f"input:{name}": value for name, value in program.lowered.request.kwargs.items() if isinstance(value, Tensor)}
    values |= {p.key: torch.zeros(p.shape, dtype=p.dtype) for p in spec.inputs if p.kind in ("number", "state", "random")}
    outputs = simulate(spec, {p.key: values[p.key] for p in spec.inputs if p.kind != "constant"})
    return {key.partition(":")[2]: value for key, value in outputs.items() if key.startswith(("metric:", "output:"))}


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", broad("cp=2"), broad("pp=2,ep=2")])
def test_metrics_have_what_was_chosen_and_what_was_dropped(mesh: str) -> None:
    """The model runs by hand, with weights of what has no place put to zero in front of its experts."""
    found = FAMILIES["mixtral"].case("mixtral", num_hidden_layers=2 if "pp" in mesh else 1)
    mine = told(compiled(found, mesh, expert_capacity=0.75))
    chosen: dict[str, Tensor] = {}
    dropped: dict[str, int] = {}

    def limit(path: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, choice, weights = args
            rows = choice.view(4, 24)
            taken = torch.tensor(by_hand(rows, [[*range(24)]] * 4, 5)).view(choice.shape)
            chosen[path], dropped[path] = choice.flatten().bincount(minlength=4), int((taken < 0).sum())
            return x, choice, torch.where(taken < 0, 0.0, weights)

        return hook

    for path, module in found.model.named_modules():
        if path.endswith("mlp.experts"):
            module.register_forward_pre_hook(limit(path))
    torch.testing.assert_close(mine["output"], found.model(**found.call_kwargs).loss.detach())
    assert len(chosen) == found.model.config.num_hidden_layers and any(dropped.values())
    for path, counts in chosen.items():
        assert torch.equal(mine[f"routed:{path}"], counts) and int(mine[f"dropped:{path}"]) == dropped[path]
    loads: Any = with_loads(mine)["experts"]
    load = loads["model.layers.0.mlp.experts"]
    assert load.imbalance == pytest.approx(float(load.tokens.max()) / 24) and load.tokens.sum() == 96 and set(loads) == set(chosen)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_an_expert_takes_the_first_or_the_heaviest(capacity: int) -> None:
    generator = torch.Generator().manual_seed(capacity)
    choice = torch.stack([torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)]) for _ in range(3)])
    weights = torch.randint(0, 5, choice.shape, generator=generator) / 4.0  # some are equal
    flat, heavy = choice.flatten(1), weights.flatten(1)
    assert counts_of_rows(choice, 4).tolist() == [[int((row == expert).sum()) for expert in range(4)] for row in flat]
    none = torch.zeros(3, 4, dtype=torch.int64)
    positions = [[*range(18)]] * 3
    assert first_choices(choice, none, capacity, False, "").flatten(1).tolist() == by_hand(flat, positions, capacity)
    order = [sorted(range(18), key=lambda place, row=row: (-float(row[place]), place)) for row in heavy]  # type: ignore[misc]
    assert heaviest_choices(choice, weights, 4, capacity, False, "").flatten(1).tolist() == by_hand(flat, order, capacity)
    halves = first_choices(choice[:, 4:], counts_of_rows(choice[:, :4], 4), capacity, False, "")
    assert torch.equal(halves, first_choices(choice, none, capacity, False, "")[:, 4:])


def test_what_has_chosen_nothing_is_counted_nowhere() -> None:
    choice = torch.tensor([[[3, -1], [3, 1]]])
    none = torch.zeros(1, 3, dtype=torch.int64)
    assert counts_of_rows(choice, 3).tolist() == [[0, 1, 0]] and first_choices(choice, none, 1, True, "").tolist() == [[[-1, -1], [-1, 1]]]


@pytest.mark.broad
def test_an_error_names_the_layer_and_the_expert() -> None:
    program = compiled(shallow("mixtral"), "dp=2", expert_capacity=0.75, overflow="error")
    said = r"model\.layers\.0\.mlp\.experts: expert \d is chosen by \d+ tokens of group \d, and takes 5"
    with pytest.raises(meshc.InputError, match=said) as raised:
        meshc.verify(program, dtype=torch.float64)
    assert 'a higher Options(experts=Experts(capacity=)), or overflow="drop" or "pass"' in str(raised.value)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"expert_capacity": 0.01}, r"lets an expert take 0.06 tokens of a group: 12 tokens choose 2 of 4 experts(.|\n)* 0.167 or more"),
        ({"expert_capacity": 1.0, "expert_group": 7}, r"the 48 tokens of these experts are no number of groups of 7 tokens"),
    ],
)  # fmt: skip
def test_a_capacity_that_cannot_be_is_refused_while_tracing(options: dict[str, Any], said: str) -> None:
    """In words of its own, not as something that cannot be traced."""
    with pytest.raises(meshc.CaptureError, match=said) as raised:
        compiled(shallow("mixtral"), "dp=2", **options)
    first, *_, last = str(raised.value).splitlines()
    assert first.startswith("Options(experts=Experts(capacity=") and "what to do" not in first and last.startswith("  what to do: ")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"expert_capacity": 0}, "a number above 0, such as 1.25"),
        ({"expert_capacity": 1.0, "overflow": "spill"}, "use one of 'drop', 'pass', 'error'"),
        ({"expert_capacity": 1.0, "expert_priority": "gate"}, "use one of 'position', 'weight'"),
        ({"expert_capacity": 1.0, "expert_group": 0}, "at least 1 token"),
        ({"expert_capacity": 1.0, "expert_bound": 1.5}, "a capacity is a bound"),
        ({"expert_capacity": 1.0, "dynamic": {"input_ids": {0: torch.export.Dim("batch", max=8)}}}, "sizes are open then"),
        ({"overflow": "pass"}, r"what to do: Options\(expert_capacity=1.25\) beside it"),
    ],
)  # fmt: skip
def test_what_makes_no_capacity_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(meshc.PlanError, match=said):
        meshc.Options(**options)
