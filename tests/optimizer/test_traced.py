"""Optimizers that are traced: torch's own and users' classes, against `optimizer.step()` itself; what cannot be traced is refused."""

from __future__ import annotations

import copy
import math
from math import exp

import pytest
import torch

from meshc.errors import CompileError, InputError
from meshc.optimizer import optimizer as mo
from tests.broad import broad
from tests.optimizer.stepped import SHAPES, parameters, plain_call, run

TRACED = [
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"maximize": True}),
    (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    (torch.optim.Adamax, {"weight_decay": 0.1, "betas": (0.5, 0.8)}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.RAdam, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    (torch.optim.RAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1, "capturable": True}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2, "weight_decay": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2.0, "lambd": 0.1}),
    (torch.optim.Rprop, {"lr": 0.05, "etas": (0.3, 1.4), "step_sizes": (1e-3, 0.2)}),
    (torch.optim.Adafactor, {"lr": 0.3, "weight_decay": 0.1}),
    (torch.optim.Muon, {"lr": 0.1}),
]
AGAIN = (2, 6, 8, 10)
"""Places of those whose optimizer stands there with other options too."""


@pytest.mark.parametrize("kind, options", [broad(*one) if number in AGAIN else one for number, one in enumerate(TRACED)])
def test_traced_equals_torch(kind, options):
    """Seven steps (RAdam's rectification starts at the sixth) under a schedule that never compiles again, starting after `describe`."""
    shapes = SHAPES[:1] if kind is torch.optim.Muon else SHAPES[:2]
    optimizer = kind(parameters(shapes), **{k: v for k, v in options.items() if k != "capturable"})
    if options.get("capturable"):  # torch asserts that such a step runs on a GPU: describe one, step the other
        optimizer.param_groups[0]["capturable"] = True
        mo.describe(optimizer)
        optimizer.param_groups[0]["capturable"] = False
    spec = mo.describe(optimizer)

    def change(k):
        optimizer.param_groups[0]["lr"] *= 0.8
        assert spec.key_of(optimizer) == spec.key

    shadow = run(optimizer, steps=7, change=change)
    assert shadow.spec.groups[0].kind == "other"


def test_traced_update_has_names_and_only_tensor_operators():
    optimizer = torch.optim.RAdam(parameters(((4, 3),)), lr=0.1)
    (update,) = mo.describe(optimizer).groups[0].traced.values()
    names = [node.name for node in update.graph.graph.nodes if node.op == "placeholder"]
    assert names == [
        "param",
        "grad",
        "state_step",
        "state_exp_avg",
        "state_exp_avg_sq",
        "number_lr",
        "number_betas_0",
        "number_betas_1",
        "number_eps",
        "number_weight_decay",
    ]
    assert update.outputs == ("param", "state:step", "state:exp_avg", "state:exp_avg_sq")
    targets = [node.target for node in update.graph.graph.nodes if node.op == "call_function"]
    assert all(isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" for target in targets)
    assert not any("_local_scalar_dense" in str(target) or target._schema.is_mutable for target in targets)
    full_size_selects = [n for n in update.graph.graph.nodes if n.target is torch.ops.aten.where.self and n.meta["val"].dim() > 0]
    assert len(full_size_selects) == 1  # one branch on the step count, joined once


def test_branch_on_a_number_is_a_guard():
    optimizer = torch.optim.RMSprop(parameters(), lr=0.1)
    spec = mo.describe(optimizer)
    optimizer.param_groups[0]["alpha"] = 0.5
    assert spec.key_of(optimizer) == spec.key
    optimizer.param_groups[0]["weight_decay"] = 0.25
    assert mo.changes(spec.key, spec.key_of(optimizer)) == ["group 0: weight_decay != 0: False -> True"]


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                m, g = state["exp_avg"], p.grad
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m.mul(beta1).add(g, alpha=1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(g, alpha=1 - beta2)


class HandAdam(torch.optim.Optimizer):
    """As people write it: an int count in the state, warm-up by a branch, a copy of the parameter, torch._foreach."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "slow": 0.5})

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p), anchor=p.detach().clone())
                    state["step"] += 1
                    torch._foreach_lerp_([state["m"]], [p.grad], 1 - group["betas"][0])
                    state["v"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad.conj(), value=1 - group["betas"][1])
                    rate = group["lr"] * min(1.0, state["step"] / 4) / (1 - group["betas"][0] ** state["step"])
                    if state["step"] > 2:
                        p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-rate)
                    else:
                        p.add_(state["m"].sign(), alpha=-rate)
                    if state["step"] % 3 == 0:
                        state["anchor"].lerp_(p, group["slow"])
                        p.copy_(state["anchor"])


class OldMomentum(torch.optim.Optimizer):
    """State made from the first gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    buffer = state["momentum_buffer"] = torch.clone(p.grad).detach()
                else:
                    buffer = state["momentum_buffer"]
                    buffer.mul_(0.9).add_(p.grad, alpha=0.5)
                p.add_(buffer, alpha=-group["lr"])


class Roots(torch.optim.Optimizer):
    """Python's `math` on a count that begins as a default."""

    def __init__(self, params, lr=0.1, decay=0.7):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                rate = group["lr"] / math.sqrt(state["step"]) + math.pow(state["step"], -group["decay"]) * exp(-state["step"])
                p.add_(p.grad, alpha=-rate * math.sqrt(4))


@pytest.mark.parametrize("kind", [Lion, HandAdam, OldMomentum, Roots])
def test_users_own_class(kind):
    optimizer = kind(parameters(SHAPES[:2] if kind is HandAdam else SHAPES))  # which is traced anew at each step, for its count
    before = copy.deepcopy(optimizer.state_dict())
    spec = mo.describe(optimizer)
    assert str(optimizer.state_dict()) == str(before)

    def change(k):
        optimizer.param_groups[0]["lr"] *= 0.8
        assert spec.key_of(optimizer) == spec.key

    run(optimizer, steps=7, change=change)


def test_resumed_traced_state():
    for kind in (torch.optim.Rprop, torch.optim.ASGD, HandAdam, OldMomentum):
        optimizer = kind(parameters(SHAPES[:2]), lr=0.05)
        for _ in range(2):
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.ones_like(p) * 0.3
            optimizer.step()
        run(optimizer, steps=4)


class BakesRoot(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p.add_(p.grad, alpha=-0.1 / float(state["step"]) ** 0.5)


class CountsInGroup(BakesRoot):
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


class CountsInSelf(BakesRoot):
    _count = 0

    def step(self):
        with torch.no_grad():
            self._count += 1
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1 / self._count)


class Couples(BakesRoot):
    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        norm = sum(p.grad.square().sum() for p in params) ** 0.5
        for p in params:
            p.sub_(p.grad / norm)


class NeedsClosure(BakesRoot):
    def step(self, closure):
        closure()


@pytest.mark.parametrize(
    "kind, words",
    [
        (torch.optim.LBFGS, "LBFGS evaluates the model several times"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (NeedsClosure, r"NeedsClosure.step needs closure"),
        (BakesRoot, r"BakesRoot.step uses float\(\) on a value that changes from step to step"),
        (CountsInGroup, r"CountsInGroup.step changes group\['k'\]"),
        (CountsInSelf, r"CountsInSelf.step changes self._count"),
        (Couples, "Couples: after three steps on small tensors its traced update differs"),
    ],
)
def test_refused(kind, words):
    optimizer = kind(parameters(SHAPES[:2]))
    with pytest.raises(CompileError, match=words):
        mo.describe(optimizer)
    assert not optimizer.state or kind is torch.optim.LBFGS


def test_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(CompileError, match="parameter 0 of group 0 has a sparse gradient"):
        mo.describe(torch.optim.SGD(embedding.parameters(), lr=0.1))


def test_untraced_shape_is_refused():
    (group,) = mo.describe(torch.optim.RMSprop(parameters())).groups
    value = torch.zeros(9, 9, dtype=torch.float64)
    with pytest.raises(InputError, match=r"no update was traced for a parameter of shape \(9, 9\)"):
        mo.update_nodes(group, value, value, {}, {}, plain_call)


def test_hooks_and_wrapped_steps_do_not_run():
    optimizer = Lion(parameters())
    optimizer.register_step_pre_hook(lambda *a: pytest.fail("a hook ran"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mo.describe(optimizer)
    assert not optimizer.state and not getattr(optimizer, "_opt_called", False)
