"""Refusals that are caught: where all ranks refuse the same, the run goes on; where one does, all stop. Each function is one check."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshc
from meshc.runtime.agreement import compare
from meshc.runtime.failure.failed_rank import world_board
from tests.models import Case, mlp
from tests.processes.failure import Branching
from tests.processes.local_inputs import parts
from tests.processes.reference import close, sgd, train
from tests.processes.session import run_checks


def trained(case: Case, mesh: Any, inputs: str = "global") -> tuple[meshc.Program, list[float]]:
    """A training step's program, and the losses that plain PyTorch has in two steps."""
    start = copy.deepcopy(case.model)
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss)
    wanted, _, _ = train(start, case.loss_of, case.kwargs, sgd, clip=None)
    return meshc.compile(step, mesh, inputs=inputs), wanted


def shapes(mesh: Any) -> None:
    """Every rank passes inputs that do not fit together, rank 1 two seconds after the others; the next step is as if nothing had been."""
    case = mlp(torch.float64)
    program, wanted = trained(case, mesh, "local")
    mine = parts(case.call_kwargs, mesh)
    ours = [program(**mine).item()]
    if dist.get_rank() == 1:
        time.sleep(2)
    with pytest.raises(meshc.CaptureError, match="Expected input batch_size"):
        program(**{**mine, "x": mine["x"][:-1]})
    ours.append(program(**mine).item())
    close(ours, wanted, 1e-10)


def values(mesh: Any) -> None:
    """Ranks differ in the values that they pass, which all of them see; the second call is right."""
    case = mlp(torch.float64)
    program, wanted = trained(case, mesh)
    with pytest.raises(meshc.InputError, match="passed different inputs"):
        program(**{**case.call_kwargs, "x": case.kwargs["x"] + dist.get_rank()})
    close([program(**case.call_kwargs).item() for _ in range(2)], wanted, 1e-10)


def out_of_range(mesh: Any) -> None:
    """Every rank passes an index that the model has no row for: found while the program runs, and the next step is as if it had not."""

    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, 4, dtype=torch.float64)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).square().sum()

    torch.manual_seed(0)
    model = Embeds()
    start = copy.deepcopy(model)
    given = {"ids": torch.arange(8) % 12}
    wanted, _, _ = train(start, lambda loss: loss, given, sgd, clip=None)
    program = meshc.compile(meshc.TrainStep(model, optimizer=sgd(model.parameters())), mesh)
    ours = [program(**given).item()]
    with pytest.raises(meshc.InputError, match="ids holds 12, where 0 to 11 is legal"):
        program(ids=given["ids"] + 5)
    close([*ours, program(**given).item()], wanted, 1e-10)


def features(mesh: Any) -> None:
    """Inputs that the model itself cannot take: the compilation that they ask for fails on every rank."""
    case = mlp(torch.float64)
    program, wanted = trained(case, mesh)
    ours = [program(**case.call_kwargs).item()]
    with pytest.raises(meshc.CaptureError):
        program(**{**case.call_kwargs, "x": case.kwargs["x"][:, :-1]})
    close([*ours, program(**case.call_kwargs).item()], wanted, 1e-10)


def converted(mesh: Any) -> None:
    """A model that is converted after it was compiled, or given other modules, is not trained beside the program; once it is as it was, the
    run goes on. Values that a loader swaps into the parameters are taken, and a hook is compiled in."""
    case = mlp(torch.float64)
    program, wanted = trained(case, mesh)
    ours = [program(**case.call_kwargs).item()]
    values = {name: value.clone() for name, value in case.model.state_dict().items()}
    for convert in (case.model.float, lambda: case.model.to("meta")):
        convert()
        with pytest.raises(meshc.StateError, match="the model was converted after it was compiled"):
            program(**case.call_kwargs)
    case.model.to_empty(device="cpu")
    case.model.double()
    with swapped_parameters():
        case.model.load_state_dict(values)
    layer, case.model.up = case.model.up, nn.Linear(24, 40, dtype=torch.float64)
    with pytest.raises(meshc.StateError, match="put into the model after it was compiled: up.weight, up.bias"):
        program(**case.call_kwargs)
    case.model.up = layer
    close([*ours, program(**case.call_kwargs).item()], wanted, 1e-10)
    case.model.down.register_forward_hook(lambda module, inputs, output: output * 0)
    close([program(**case.call_kwargs).item()], [math.log(10)], 1e-10)


@contextmanager
def swapped_parameters() -> Iterator[None]:
    """In it torch's loaders put other memory into parameters, and do not copy into theirs."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def compilations(mesh: Any) -> None:
    """A model that cannot be traced, a plan that does not fit; then the same model with a plan that does."""
    with pytest.raises(meshc.CaptureError, match="Data-dependent"):
        meshc.compile(Branching(True), mesh, kwargs={"x": torch.ones(4, 8)})
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    with pytest.raises(meshc.PlanError, match="did you mean batch"):
        meshc.compile(case.model, mesh, kwargs=case.kwargs, plan="dp: bach")
    with pytest.raises(meshc.PlanError, match="compile meshc.TrainStep"):
        meshc.compile(case.model, mesh, kwargs=case.kwargs, plan="zero1")
    program = meshc.compile(case.model, mesh, kwargs=case.kwargs)
    assert torch.allclose(program(**case.kwargs), twin(**case.kwargs), atol=1e-12)


def empty(mesh: Any) -> None:
    """A model on `meta` is called before it has values, and after."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    program = meshc.compile(case.model.to("meta"), mesh, kwargs=case.kwargs)
    with pytest.raises(meshc.StateError, match="have no values yet"):
        program(**case.kwargs)
    program.load_state_dict(twin.state_dict())
    assert torch.allclose(program(**case.kwargs), twin(**case.kwargs), atol=1e-12)


def alone(mesh: Any) -> None:
    """Rank 1 refuses a call that rank 0 never comes to, as it is busy elsewhere: rank 1 stops soon after it has waited for rank 0
    (3 s here, not 15), rank 0 where it next looks."""
    compare.REFUSAL_S = 3.0
    case = mlp(torch.float64)
    program, _ = trained(case, mesh, "local")
    mine = parts(case.call_kwargs, mesh)
    program(**mine)
    begin = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.raises(meshc.InputError, match="target"):
            program(x=mine["x"])
        assert time.monotonic() - begin < 14
    else:
        while time.monotonic() - begin < 20:
            try:
                world_board().check()
            except meshc.PeerError:
                break
            time.sleep(0.1)
        assert time.monotonic() - begin < 14
    for _ in range(2):
        with pytest.raises(meshc.PeerError, match="rank 1 failed at step 1, call: InputError"):
            program(**mine)


def one_of_all(mesh: Any) -> None:
    """Rank 1 refuses a call that rank 0 runs: rank 0 is told within 30 s, and it is final on both, although both catch it."""
    case = mlp(torch.float64)
    program, _ = trained(case, mesh, "local")
    mine: dict[str, Tensor] = parts(case.call_kwargs, mesh)
    program(**mine)
    begin = time.monotonic()
    wrong = {name: value[:-1] for name, value in mine.items()} if dist.get_rank() == 1 else mine
    with pytest.raises(meshc.InputError if dist.get_rank() == 1 else meshc.PeerError, match="drop_last=True"):
        program(**wrong)
    assert time.monotonic() - begin < 30
    with pytest.raises(meshc.PeerError, match="rank 1 failed at step 1, compile: InputError"):
        program(**mine)


def first_call(mesh: Any) -> None:
    """Rank 1 evaluates by itself, and rank 0 trains on: both are told within 30 s what rank 1 was to do."""
    case = mlp(torch.float64)
    program, _ = trained(case, mesh)
    program(**case.call_kwargs)
    begin = time.monotonic()
    with pytest.raises(meshc.StateError if dist.get_rank() == 1 else meshc.PeerError, match="call it on every rank, evaluation too"):
        with torch.no_grad():
            (case.model if dist.get_rank() == 1 else program)(**(case.kwargs if dist.get_rank() == 1 else case.call_kwargs))
    assert time.monotonic() - begin < 30


CHECKS: tuple[Callable[[Any], None], ...] = (
    shapes, values, out_of_range, features, converted, compilations, empty, alone, one_of_all, first_call,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
