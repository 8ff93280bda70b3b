"""Gradients that a model or a loss takes for itself (`torch.autograd.grad`), and training through them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import meshc
from tests.broad import broad
from tests.meaning.checks import MESHES, calls_alike, module_means_itself, step_means_itself

grad = torch.autograd.grad


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Equation(nn.Module):
    """A physics-informed network: what Burgers' equation leaves over, of first and second derivatives by the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.net(x)
        (first,) = grad(u.sum(), x, create_graph=True)
        (second,) = grad(first[:, :1], x, torch.ones_like(u), create_graph=True)
        residual: Tensor = first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]
        return residual


class Forces(nn.Module):
    """Energies of molecules, and the forces that are their negative gradients by positions; in evaluation without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.pairs, self.out = nn.Embedding(5, 6), nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, kinds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.clone().requires_grad_(True)
            apart = positions[:, :, None] - positions[:, None]
            distances = (apart.square().sum(-1, keepdim=True) + 0.01).sqrt()
            near = torch.exp(-((distances - torch.arange(4, dtype=positions.dtype)) ** 2))
            h = self.kinds(kinds) + (functional.softplus(self.pairs(near)) * self.kinds(kinds)[:, None]).sum(2)
            energy = self.out(torch.tanh(h)).sum((1, 2))
            (slope,) = grad(outputs=[energy.sum()], inputs=positions, create_graph=self.training)
        return energy, -slope


class Penalty(nn.Module):
    """A critic's step of WGAN-GP, through a block whose operators have backward operators of their own, part of it checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3, padding=1)
        self.mix = nn.MultiheadAttention(6, 2, dropout=0.25, batch_first=True)
        self.norm, self.steps, self.out = nn.LayerNorm(6), nn.GRU(6, 4, batch_first=True), nn.Linear(4, 1)

    def critic(self, x: Tensor) -> Tensor:
        h = functional.leaky_relu(self.conv(x), 0.2).transpose(1, 2)
        h = checkpoint(self.norm, h + self.mix(h, h, h)[0], use_reentrant=False)
        out: Tensor = self.out(self.steps(h)[0].mean(1))
        return out

    def forward(self, real: Tensor, made: Tensor, share: Tensor) -> Tensor:
        between = (share * real + (1 - share) * made).requires_grad_(True)
        given = self.critic(between)
        slope = grad(given, between, torch.ones_like(given), True, True, True)[0]
        penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        loss: Tensor = self.critic(made).mean() - self.critic(real).mean() + 10 * penalty
        return loss


class Learner(nn.Module):
    """MAML: a step on the parameters themselves, and the loss behind it; `first` order leaves out how the step depends on them."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.net = first, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, labels: Tensor, query: Tensor, wanted: Tensor) -> Tensor:
        parameters = dict(self.net.named_parameters())
        loss = functional.cross_entropy(functional_call(self.net, parameters, (x,)), labels)
        slopes = grad(loss, self.net.parameters(), create_graph=not self.first)
        adapted = {name: p - 0.1 * slope for (name, p), slope in zip(parameters.items(), slopes, strict=True)}
        return functional.cross_entropy(functional_call(self.net, adapted, (query,)), wanted)


class Equilibrium(nn.Module):
    """A fixed point, whose gradient a hook finds by gradients of one more step."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.given = nn.Linear(6, 6), nn.Linear(6, 6)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.state(z) + self.given(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = self.step(z, x)
        z = self.step(z, x)
        still = z.clone().detach().requires_grad_()
        again = self.step(still, x)

        def implicit(slope: Tensor) -> Tensor:
            found = slope
            for _ in range(4):
                found = grad(again, still, found, retain_graph=True)[0] + slope
            return found

        z.register_hook(implicit)
        return z


class Forms(nn.Module):
    """What tensors come to be leaves by, and gradients of several things at once: unused, batched, by weights, Jacobians and Hessians."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = torch.tanh(self.b(h))
        outputs, inputs = [y.sum(), h.square().sum()], [h, self.b.weight, self.unused.weight]
        of_h, of_weight, nothing = grad(outputs, inputs, allow_unused=True, create_graph=True)
        assert nothing is None
        kept = grad(y.square().sum(), h)[0]
        shift = torch.zeros(4, dtype=x.dtype, requires_grad=True)
        moved = x * 1
        moved.requires_grad = True
        shown = self.b(torch.tanh(self.a(moved + shift))).sum(0)
        eye = torch.eye(3, dtype=x.dtype)
        (rows,) = grad(shown, moved, eye, is_grads_batched=True, create_graph=True)
        (by_shift,) = grad(shown.square().sum(), shift, create_graph=True)
        bends = torch.autograd.functional.hessian(lambda p: self.b(torch.tanh(self.a(x * p))).square().mean(), torch.ones_like(shift), True)
        more = of_weight.square().sum() + by_shift.sum() + bends.sum()
        return y + of_h.sum(1, keepdim=True) + kept.mean(1, keepdim=True) + rows.square().sum((0, 2)).unsqueeze(1) + 0.01 * more


LABELS = torch.arange(7) % 3
KINDS = torch.arange(21).reshape(7, 3) % 5
SHARE = torch.rand(7, 1, 1, generator=torch.Generator().manual_seed(3))
MODELS = {
    "equation": (Equation, {"x": normal(7, 2)}),
    "forces": (Forces, {"kinds": KINDS, "positions": normal(7, 3, 3)}),
    "penalty": (Penalty, {"real": normal(7, 3, 5), "made": normal(7, 3, 5, seed=1), "share": SHARE}),
    "learner": (lambda: Learner(False), {"x": normal(7, 4), "labels": LABELS, "query": normal(7, 4, seed=1), "wanted": LABELS.flip(0)}),
    "equilibrium": (Equilibrium, {"x": normal(7, 6)}),
    "forms": (Forms, {"x": normal(7, 4)}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [broad(MESHES[0]), MESHES[1], broad("pp=2")])
def test_a_step_trains_through_gradients(name: str, mesh: str) -> None:
    """Seven rows, none of which is alike on all ranks: of rows a gradient is the rank's own, of parameters a sum over ranks."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    step_means_itself(make(), inputs, mesh)


@pytest.mark.parametrize("name", ["forces", broad("equation"), broad("penalty"), broad("learner"), broad("forms")])
def test_a_module_has_gradients_of_gradients(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    module_means_itself(make(), inputs, MESHES[1])


class Still(Forces):
    def forward(self, kinds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        energy, forces = super().forward(kinds, positions)
        return energy.detach(), forces


class Adapted(Learner):
    def forward(self, x: Tensor, labels: Tensor, query: Tensor, wanted: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x, labels, query, wanted).detach()


def test_without_gradients_a_model_takes_its_own() -> None:
    """Under `no_grad`, of inputs and of parameters; and in evaluation of a graph that torch frees, from which the rest has gradients."""
    torch.manual_seed(0)
    module_means_itself(Still().eval(), MODELS["forces"][1], MESHES[1], grad=False)
    module_means_itself(Adapted(True), MODELS["learner"][1], MESHES[1], grad=False)
    module_means_itself(Forces().eval(), MODELS["forces"][1], MESHES[1])


def test_an_input_stays_what_its_caller_has() -> None:
    """The leaf is the program's: torch would leave `requires_grad` set on the caller's tensor."""
    torch.manual_seed(0)
    x = normal(7, 2)
    program = meshc.compile(Equation(), meshc.Mesh("dp=2"), args=(x,))
    meshc.verify(program, (x,))
    assert not x.requires_grad and x.grad is None
    calls_alike(Forces(), MODELS["forces"][1])


def test_a_steps_loss_takes_gradients() -> None:
    """Of the model's output by what the model returns beside it, written out by hand for a linear model: d = w x, so the slope is w."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3.0, 4.0]))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.requires_grad_()
            return x @ self.weight, x

    def loss(output: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
        (slope,) = grad(output[0].sum(), output[1], create_graph=True)
        return (slope.norm(dim=1) - wanted).square().mean()

    model = Linear().double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    inputs = {"x": normal(4, 2).double(), "wanted": torch.ones(4).double()}
    program = meshc.compile(step, meshc.Mesh("dp=2"), kwargs=inputs)
    report = meshc.verify(program, dtype=torch.float64)
    assert report.ok
    plain = Linear().double()
    value = loss(plain(inputs["x"].clone()), inputs["wanted"])
    value.backward()
    assert value.item() == 16.0 and torch.allclose(plain.weight.grad, 8 * torch.tensor([0.6, 0.8]).double())  # |w| = 5, so (5 - 1)^2


class Cast(Forces):
    """With the region that autocast is in: behind it, or switched off, or around the gradient too."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, kinds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.clone().requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.tanh(self.pairs(positions.repeat(1, 1, 2)[..., :4]) + self.kinds(kinds))
            energy = self.out(h).sum((1, 2))
            with torch.autocast("cpu", enabled=self.where == "around"):
                if self.where != "behind":
                    (slope,) = grad(energy.sum(), positions, create_graph=True)
        if self.where == "behind":
            (slope,) = grad(energy.sum(), positions, create_graph=True)
        return energy, -slope


@pytest.mark.parametrize("where", ["behind", "off"])
def test_a_gradient_goes_through_autocast(where: str) -> None:
    torch.manual_seed(0)
    program = meshc.compile(Cast(where), meshc.Mesh("dp=2"), kwargs=MODELS["forces"][1])
    assert "bf16" in str(program) and meshc.verify(program).ok


def test_a_gradient_within_autocast_is_refused() -> None:
    with pytest.raises(meshc.CompileError, match=r"grad\(\) at test_inner_gradients.py:\d+ cannot .*\n.*behind the region, or here under"):
        meshc.compile(Cast("around"), meshc.Mesh("dp=2"), kwargs=MODELS["forces"][1])


class Refused(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.a = what, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = self.a(x)
        if self.what == "backward":
            y.sum().backward()
        if self.what == "distance":
            return grad(torch.cdist(y, y + 1).sum(), x, create_graph=True)[0].square()
        return grad(y.sum(), x)[0]


@pytest.mark.parametrize(
    "what, said",
    [
        ("backward", r"a gradient that the model needs for itself is torch.autograd.grad\(y.sum\(\), x, create_graph=True\)"),
        ("no_grad", r"torch.enable_grad\(\):`, .* or write torch.func.grad\(lambda x: model\(x\).sum\(\)\)\(x\)"),
        ("distance", r"goes through cdist, which has no second derivative\n.*write that operator out"),
    ],
)
def test_what_is_refused_says_what_to_write(what: str, said: str) -> None:
    refused = pytest.raises(meshc.CaptureError, match=rf"(?s)in your model: .*test_inner_gradients.py:\d+.*{said}")
    with refused, torch.set_grad_enabled(what != "no_grad"):
        meshc.compile(Refused(what), meshc.Mesh("dp=2"), args=(normal(4, 4),))
