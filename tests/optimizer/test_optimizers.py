"""Every optimizer of torch under fsdp and tp, optimizers that call others, and what is refused: on simulated ranks, in float64."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import artifact
from meshc.optimizer import optimizer as mo
from meshc.optimizer.find_optimizers import find_optimizers
from tests.broad import broad
from tests.models import mlp
from tests.wrappers import WRAPPERS, Chained, adamw, matrices, muon, rest

EQUAL = {
    "ASGD": {}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {"weight_decay": 0.1}, "Adam": {"amsgrad": True, "foreach": True},
    "AdamW": {"fused": True, "maximize": True}, "Adamax": {"foreach": True}, "Muon": {}, "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {"lr": 0.1}, "RMSprop": {"centered": True, "momentum": 0.9}, "Rprop": {"maximize": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "differentiable": True},
}  # fmt: skip
REFUSED = {"LBFGS": "LBFGS evaluates the model several times", "SparseAdam": "SparseAdam takes sparse gradients"}
CLASSES = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"]


class Net(nn.Module):
    """Matrices of unequal sides, a bias, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 9), nn.Linear(9, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


INPUTS = (torch.randn(6, 6, generator=torch.Generator().manual_seed(1)), torch.randn(6, 4, generator=torch.Generator().manual_seed(2)))


def compiled(model: nn.Module, optimizer: Any, mesh: str = "dp=2", plan: str = "fsdp", **more: Any) -> meshc.Program:
    step = meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss, **more)
    dtype = next(model.parameters()).dtype
    return meshc.compile(step, meshc.Mesh(mesh), args=tuple(value.to(dtype) for value in INPUTS), plan=plan)


def test_the_table_knows_every_class_of_torch() -> None:
    assert sorted(CLASSES) == sorted([*EQUAL, *REFUSED])


class Branches(nn.Module):
    """A matrix and a bias for each optimizer, whose results are summed; and a last matrix, which the last one has too."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.ModuleDict({name: nn.Linear(6, 9) for name in names}), nn.Linear(9, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(sum((up(x) for up in self.up.values()), torch.zeros(()))))


STEPPED = [name for name in EQUAL if name != "Muon"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(STEPPED[1::2], id="three steps"), broad(STEPPED[::2], id="three steps of the others"),
        pytest.param(["Muon"], id="bfloat16"),
    ],
)  # fmt: skip
def test_equals_one_device(names: list[str], tmp_path: Path) -> None:
    """All at once, each with parameters of its own. Muon computes in bfloat16, where products of halves would be off by percents."""
    model = Branches(names).double()
    held = {name: list(up.parameters()) for name, up in model.up.items()}
    held[names[-1]].append(model.down.weight)
    held = {name: [p for p in ps if p.ndim == 2 or name != "Muon"] for name, ps in held.items()}
    optimizers = [getattr(torch.optim, name)(held[name], **EQUAL[name]) for name in names]
    program = compiled(model, optimizers, "tp=2", "tp: ffn; store params, grads, state")
    report = meshc.verify(program, dtype=torch.float64)
    errors = [(error, name) for kind, name, error in report.rows if kind.startswith("parameter after step")]
    assert len(errors) == sum(map(len, held.values())) * (1 if names == ["Muon"] else 3)
    assert max(errors)[0] < 1e-10, max(errors)
    states = [port for port in program.compiled.inputs if port.kind == "state" and port.shape and max(port.shape) > 1]
    assert states and all(port.sharding.split_axes() for port in states if port.shape[0] > 1 or port.of == "down.weight")
    program.save(tmp_path / "saved")
    assert artifact.load(tmp_path / "saved").outputs


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    with pytest.raises(meshc.CompileError, match=REFUSED[name]):
        compiled(net(), getattr(torch.optim, name)(net().parameters()))


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_a_wrapper_steps(name: str) -> None:
    model = net()
    step = meshc.TrainStep(model, optimizer=WRAPPERS[name](model))
    assert [type(one).__name__ for one in step.optimizers.members] == ["Muon", "AdamW"] and not step.optimizers.idle
    assert len(step.optimizers.wrappers) == {"list": 0, "plain": 2}.get(name, 1)
    assert all(p.grad is None for p in model.parameters()) and not any(one.state for one in step.optimizers.members)


@pytest.mark.broad
def test_wrapper_equals_one_device() -> None:
    """One step, since Muon is in it; more of them on real ranks (tests/processes/optimizers.py)."""
    case = mlp()
    step = meshc.TrainStep(case.model, optimizer=WRAPPERS["plain"](case.model), loss=F.cross_entropy, clip_grad_norm=1.0)
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=case.call_kwargs)
    report = meshc.verify(program, dtype=torch.float64)
    errors = {name: error for kind, name, error in report.rows if kind.startswith("parameter")}
    assert errors.keys() == dict(case.model.named_parameters()).keys() and max(errors.values()) < 1e-10, report
    assert [port.name for port in program.compiled.inputs if port.kind == "number" and port.name.endswith(".lr")] == ["0.lr", "1.lr"]


def test_two_matrices_of_one_update_are_gathered_once() -> None:
    """Newton-Schulz takes fifteen products; what is sent for them is one gather of each matrix."""
    model = net()
    program = compiled(model, torch.optim.Muon(matrices(model)), "tp=2", "tp: ffn")
    text = str(program)
    of_them, shared = [note for note in program.compiled.notes if "whole matrices" in note]
    assert re.search(r"^the optimizer updates \S+ and 1 more by products of whole matrices, \S+ GFLOP a step$", of_them)
    assert re.search(r"^updates of whole matrices: every rank computes all 2, \S+ GFLOP a step: no two are alike", shared)
    updates = text[text.index("lerp") :]
    assert updates.count("aten.mm(") == 10 and updates.count("= all_gather(") == 2 and "all_reduce(" not in updates


# Inner optimizers: what a wrapper's step may do.


class Base(torch.optim.Optimizer):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(list(model.parameters()), {"lr": 0.1})
        self.muon, self.adamw = muon(model), adamw(model)

    def inner_steps(self) -> None:
        self.muon.step()
        self.adamw.step()


class WarmsUp(Base):
    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.adamw.param_groups:
            group["lr"] = 0.1 * min(1.0, self.count / 10)
        self.inner_steps()


class Scales(Base):
    def step(self, closure: Any = None) -> None:
        for group in self.muon.param_groups:
            for p in group["params"]:
                p.grad.data.mul_(1.0)
        self.inner_steps()


class Replaces(Base):
    def step(self, closure: Any = None) -> None:
        for p in self.adamw.param_groups[0]["params"]:
            p.grad = p.grad * 0.5
        self.inner_steps()


class LooksAhead(Base):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.slow = [p.detach().clone() for p in model.parameters()]

    def step(self, closure: Any = None) -> None:
        self.inner_steps()
        for slow, group in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.add_(group.detach().flatten()[0] - slow, alpha=0.5)


class Twice(Base):
    def step(self, closure: Any = None) -> None:
        self.inner_steps()
        self.muon.step()


class Closes(Base):
    def step(self, closure: Any = None) -> None:
        self.muon.step(lambda: None)


class Sharp(Base):
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "requires a closure"


class Schedules(Base):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.adamw, 30)

    def step(self, closure: Any = None) -> None:
        self.inner_steps()
        self.scheduler.step()


class Forgets(Base):
    def step(self, closure: Any = None) -> None:
        self.adamw.step()


class Holds(Base):
    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    "kind, words",
    [
        (WarmsUp, r"WarmsUp.step does more than call .*it changes self.adamw.param_groups\[0\]\['lr'\]; it changes self.count"),
        (Scales, r"it writes to the gradient of up.weight at .*test_optimizers.py:\d+ \(p.grad.data.mul_\(1.0\)\)"),
        (Replaces, "it replaces the gradient of up.bias"),
        (LooksAhead, r"LooksAhead.step writes to a tensor that it keeps outside its parameters, of shape .* at .*test_optimizers.py"),
        (Twice, "Twice.step steps Muon twice"),
        (Closes, "Closes.step gives Muon.step a closure"),
        (Sharp, "could not be tried on samples of its parameters: AssertionError: requires a closure"),
        (Schedules, "it changes self.scheduler"),
        (Forgets, r"up.weight, down.weight: held by (Forgets|Muon)"),
        (Holds, "up.weight, up.bias, down.weight, down.bias, scale: held by "),
    ],
)
def test_wrapper_that_does_more_or_less_is_refused(kind: Callable[[nn.Module], Any], words: str) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = kind(model)
    slow = [value.clone() for value in getattr(optimizer, "slow", [])]
    with pytest.raises(meshc.CompileError, match=words):
        compiled(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.adamw.state and optimizer.adamw.param_groups[0]["lr"] == 1e-2 and getattr(optimizer, "count", 0) == 0
    assert all(torch.equal(a, b) for a, b in zip(slow, getattr(optimizer, "slow", []), strict=True))
    assert getattr(optimizer, "scheduler", None) is None or optimizer.scheduler.last_epoch == 0


def test_inner_optimizer_that_is_not_found_is_refused() -> None:
    model = net()
    hidden = adamw(model)

    class Hides(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            hidden.step()

    with pytest.raises(meshc.CompileError, match=r"Hides.step calls AdamW.step, and no AdamW lies in .*Hides's attributes"):
        compiled(model, Hides(model.parameters(), {"lr": 0.1}))


def test_optimizers_added_to_a_wrapper_are_seen() -> None:
    model = net()
    both = Chained(model)
    del both.optimizers[1]
    step = meshc.TrainStep(model, optimizer=both)
    assert [type(one).__name__ for one in step.optimizers.members] == ["Muon"] and step.optimizers is step.optimizers
    both.optimizers.append(torch.optim.SGD(rest(model), lr=0.1))
    assert [type(one).__name__ for one in step.optimizers.members] == ["Muon", "SGD"]


def test_parameter_in_two_optimizers_is_refused() -> None:
    model = net()
    with pytest.raises(meshc.CompileError, match="up.weight is in group 0 of Muon and in group 0 of SGD") as caught:
        compiled(model, [torch.optim.Muon(matrices(model)), torch.optim.SGD(model.parameters(), lr=0.1)])
    assert "down.weight" in str(caught.value) and "bias" not in str(caught.value)
    with pytest.raises(meshc.CompileError, match=r"up.bias is in group 0 of SGD \(optimizer 0\) and in group 1 of SGD \(optimizer 1\)"):
        groups = [{"params": [model.down.bias]}, {"params": [model.up.bias]}]
        compiled(model, [torch.optim.SGD([model.up.bias], lr=0.1), torch.optim.SGD(groups, lr=0.1)])


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_optimizer(nothing: Any) -> None:
    with pytest.raises(meshc.StateError, match="a training step updates parameters, so it needs an optimizer") as caught:
        meshc.TrainStep(net(), optimizer=nothing)
    assert "compile the module itself" in str(caught.value)


def test_what_is_no_optimizer() -> None:
    model = net()
    for given, words in (
        (torch.optim.AdamW, "is the class AdamW: make one"),
        (model.parameters(), "is of type generator"),
        ([adamw(model), 3], "is of type int"),
        (0.1, "is of type float"),
    ):
        with pytest.raises(meshc.StateError, match=words):
            meshc.TrainStep(model, optimizer=given)
    with pytest.raises(meshc.CompileError, match="StepLR.step calls the step of none of the optimizers that it holds"):
        meshc.TrainStep(model, optimizer=torch.optim.lr_scheduler.StepLR(adamw(model), 1))


# What an optimizer leaves as it is.


class SkipsVectors(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.ndim == 2:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


def test_update_that_writes_nothing_is_refused_by_name() -> None:
    model = net()
    with pytest.raises(meshc.CompileError, match="up.bias, down.bias, scale: held by SkipsVectors, and have a gradient") as caught:
        compiled(model, SkipsVectors(model.parameters()))
    assert "weight" not in str(caught.value).split(":")[0]
    compiled(model, SkipsVectors(matrices(model)))
    for p in rest(model):
        p.requires_grad_(False)
    compiled(model, SkipsVectors(model.parameters()))


def test_rate_of_zero_writes() -> None:
    model = net()
    compiled(model, SkipsVectors([{"params": matrices(model), "lr": 0.0}]))
    compiled(model, torch.optim.Adagrad(model.parameters(), lr=0.0))


def test_parameters_that_nobody_holds_are_left_alone_with_one_note() -> None:
    model, other = net(), nn.Linear(2, 2)
    program = compiled(model, torch.optim.SGD([*model.down.parameters(), *other.parameters()], lr=0.1))
    (free,) = [note for note in program.compiled.notes if "no optimizer holds" in note]
    assert free == "no optimizer holds up.weight, up.bias, scale: they have a gradient and are not updated"
    (strange,) = [note for note in program.compiled.notes if "not the model's" in note]
    assert strange.startswith("SGD holds 2 parameters")
    assert [port.name for port in program.compiled.outputs if port.kind == "parameter"] == ["down.weight", "down.bias"]
    meshc.verify(program)


def test_groups_without_parameters() -> None:
    model = net()
    program = compiled(model, torch.optim.RMSprop([{"params": []}, {"params": list(model.parameters())}], lr=0.1))
    assert meshc.verify(program).ok
    with pytest.raises(meshc.CompileError, match="updates none of the model's parameters"):
        compiled(model, torch.optim.SGD([{"params": []}], lr=0.1))


def test_numbers_and_rates_of_all_groups() -> None:
    model = net()
    both = find_optimizers([muon(model), adamw(model)], str)
    assert [row["lr"] for row in mo.numbers(both)] == mo.rates(both) == [0.02, 0.01]
    spec = mo.describe(both)
    assert [group.index for group in spec.groups] == [0, 1] and spec.optimizer == "Muon and AdamW"
    both.members[1].param_groups[0]["weight_decay"] = 0.0
    assert mo.changes(spec.key, spec.key_of(both)) == ["group 1 (AdamW): weight_decay != 0: True -> False"]
