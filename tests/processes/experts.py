"""Routed experts on real ranks: steps, a module in autograd, what a capacity drops, and steps in which more is chosen than there are
places. A check a function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshc
from tests.models import Case
from tests.processes.session import run_checks
from tests.zoo.experts import shallow

TAKEN = 5
"""Of a row of 12 tokens that choose 2 of 4 experts each, by a capacity of 0.75."""


def _case() -> Case:
    found = shallow("mixtral")
    found.model.double()
    return found


def _step(model: nn.Module, mesh: Any, lr: float = 1e-2, **options: Any) -> meshc.Program:
    step = meshc.TrainStep(model, optimizer=_adamw(model, lr), loss=lambda output: output.loss)
    return meshc.compile(step, mesh, options=meshc.Options(**options))


def _adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)


def _drop(model: nn.Module) -> None:
    """Of each row the first tokens that choose an expert keep it, asked one at a time; the weight of the others is 0."""

    def limit(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, choice, weights = args
        kept = torch.ones_like(weights)
        for row in range(4):
            taken = [0] * 4
            for token in range(12 * row, 12 * row + 12):
                for place, expert in enumerate(choice[token].tolist()):
                    taken[expert] += 1
                    kept[token, place] = float(taken[expert] <= TAKEN)
        return x, choice, torch.where(kept > 0, weights, 0.0)

    for path, module in model.named_modules():
        if path.endswith("mlp.experts"):
            module.register_forward_pre_hook(limit)
            module.config._experts_implementation = "eager"  # type: ignore[union-attr]  # torch's products of runs know no float64


def dropped(mesh: Any) -> None:
    """Loss, what was dropped, and parameters of two steps are those of one device on which it is dropped by hand."""
    found = _case()
    twin = copy.deepcopy(found.model)
    _drop(twin)
    program = _equal_steps(found, twin, mesh, expert_capacity=0.75)
    assert any(int(load.dropped) for load in program.metrics["experts"].values())


def trained(mesh: Any) -> None:
    """Two steps are those of one device, the ranks' experts chosen by different numbers of tokens."""
    found = _case()
    program = _equal_steps(found, _twin(found.model), mesh)
    tokens = [load.tokens.view(2, -1).sum(1).tolist() for load in program.metrics["experts"].values()]
    assert any(one != other for one, other in tokens)


def module(mesh: Any) -> None:
    """Forward keeps its rows for a backward that torch asks for."""
    found = _case()
    twin, program = _twin(found.model), meshc.compile(found.model, mesh, kwargs=found.call_kwargs)
    for model, call in ((found.model, program), (twin, twin)):
        call(**found.call_kwargs).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    wanted = dict(twin.named_parameters())
    for name, parameter in found.model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad, msg=name)  # type: ignore[union-attr]


def _twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for path, experts in twin.named_modules():
        if path.endswith("mlp.experts"):
            experts.config._experts_implementation = "eager"  # type: ignore[union-attr]  # torch's products of runs know no float64
    return twin


def _equal_steps(found: Case, twin: nn.Module, mesh: Any, **options: Any) -> meshc.Program:
    """Loss and parameters of two steps are those of the twin."""
    theirs, program = _adamw(twin), _step(found.model, mesh, **options)
    for _ in range(2):
        loss = program(**found.call_kwargs)
        wanted = twin(**found.call_kwargs).loss
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss, wanted.detach())
    _same(found.model, dict(twin.named_parameters()))
    return program


def _same(model: nn.Module, wanted: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        mine = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(mine.detach(), wanted[name].detach(), msg=name)


def _token(model: nn.Module) -> int:
    """A token that, where a row is made of it alone, chooses both experts of one rank in the first layer, all along the row."""
    twin, chosen = copy.deepcopy(model), list[Tensor]()
    experts = twin.get_submodule("model.layers.0.mlp.experts")
    experts.config._experts_implementation = "eager"  # type: ignore[union-attr]
    experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    for token in range(3, 65):
        twin(input_ids=torch.full((1, 12), token))
        if (chosen.pop() < 2).all():
            return token
    raise AssertionError("no token chooses experts 0 and 1")


def _refused(mesh: Any, said: str, final: bool, **options: Any) -> None:
    """After a good step the last row asks too much: every rank is told layer and expert before it changes anything.

    Where all ranks have found it, the next good step goes on; where one did, that is final.
    """
    found = _case()
    program = _step(found.model, mesh, 1e-6, **options)  # so that the good step leaves choices as they are
    ids = found.call_kwargs["input_ids"].clone()
    ids[3] = _token(found.model)
    program(**found.call_kwargs)
    before = {name: _local(parameter).clone() for name, parameter in found.model.named_parameters()}
    for _ in range(2):
        with pytest.raises((meshc.InputError, meshc.PeerError), match=said):
            program(**{**found.call_kwargs, "input_ids": ids})
    for name, parameter in found.model.named_parameters():
        assert torch.equal(_local(parameter), before[name]), name
    if final:
        with pytest.raises(meshc.PeerError, match=said):
            program(**found.call_kwargs)
    else:
        assert program(**found.call_kwargs).isfinite()
        assert not all(torch.equal(_local(parameter), before[name]) for name, parameter in found.model.named_parameters())


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def bounded(mesh: Any) -> None:
    _refused(mesh, r"model\.layers\.0\.mlp\.experts: experts 0 to 1 are chosen 24 times in row \d of the batch", False, expert_bound=1.8)


def strict(mesh: Any) -> None:
    said = r"model\.layers\.0\.mlp\.experts: expert [01] is chosen by 12 tokens of group \d, and takes 11"
    _refused(mesh, said, True, expert_capacity=1.75, overflow="error")


def run(mesh: str, *names: str) -> None:
    run_checks((trained, module, dropped, bounded, strict), mesh, names)
