"""Transforms of torch.func that a model or a loss applies within (grad, vmap, jvp, functional_call, ...), and training through them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import meshc
from tests.broad import broad
from tests.meaning.checks import MESHES, module_means_itself, one_rank, step_means_itself


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(p), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.drop(self.norm(torch.tanh(self.up(x)))))
        return out


class Slopes(nn.Module):
    """By an embedding, of all that has an operator of meshc's: dropout, attention with dropout, written out and not, cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.heads, self.net = nn.Embedding(5, 4), nn.Linear(4, 12), Net()

    def forward(self, kinds: Tensor, labels: Tensor) -> Tensor:
        def loss(h: Tensor) -> Tensor:
            q, k, v = self.heads(h).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)
            mixed = functional.dropout(torch.softmax(mixed @ k.transpose(-1, -2) * 0.5, -1), 0.25) @ v
            out = self.net(h + mixed.transpose(1, 2).flatten(2))
            return functional.cross_entropy(out.transpose(1, 2), labels) + functional.nll_loss(out.mean(1).log_softmax(-1), labels[:, 0])

        h = self.kinds(kinds)
        value, pull = vjp(lambda rows: functional.embedding(kinds, rows).square().sum((0, 2)), self.kinds.weight)
        shown = jacrev(lambda z: self.net(z).sum((0, 1)))(h)
        return grad(loss)(h) + shown.square().sum((0,)) + pull(torch.ones_like(value))[0].square().sum()


class Learner(nn.Module):
    """MAML: two steps on the parameters themselves, and the loss behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        def loss(given: dict[str, Tensor], rows: Tensor) -> Tensor:
            return functional.cross_entropy(functional_call(self.net, given, (rows,)), labels)

        parameters = dict(self.net.named_parameters())
        for _ in range(2):
            slopes, value = grad_and_value(loss)(parameters, x)
            parameters = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
        return loss(parameters, x.flip(1)), value


class Ensemble(nn.Module):
    """PyTorch's tutorial: one module without values, called with the parameters of three models at once."""

    def __init__(self, dims: tuple[int | None, ...] = (0, 0, None), randomness: str = "error", p: float = 0.0) -> None:
        super().__init__()
        models = [Net(p) for _ in range(3)]
        parameters, _ = stack_module_state(models)
        self.names, self.base, self.dims, self.randomness = list(parameters), [copy.deepcopy(models[0]).to("meta")], dims, randomness
        self.stacked = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(p.detach()) for name, p in parameters.items()})

    def forward(self, x: Tensor) -> Tensor:
        def fmodel(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Any:
            return functional_call(self.base[0], (parameters, buffers), (x,))

        given = {name: self.stacked[name.replace(".", "_")] for name in self.names}
        out: Tensor = torch.vmap(fmodel, in_dims=self.dims, randomness=self.randomness)(given, {}, x)
        return out


class PerSample(nn.Module):
    """Gradients of each sample by all parameters, and their norms in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
            return functional.cross_entropy(functional_call(self.net, parameters, (sample.unsqueeze(0),)), label.unsqueeze(0))

        parameters = dict(self.net.named_parameters())
        slopes, values = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")(parameters, x, labels)
        return values, sum(one.flatten(1).square().sum(1) for one in slopes.values()).sqrt()


class Equation(nn.Module):
    """A physics-informed network by transforms: first and second derivatives of each sample, and one direction of all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return self.net(point).squeeze(-1)

        value, along = jvp(u, (x,), (torch.ones_like(x),))
        doubled = {name: 2 * p for name, p in self.net[0].named_parameters()}
        other = torch.tanh(functional_call(self.net[0], doubled, (x,))).sum(1)
        turned = jacfwd(lambda p: u(p).sum())(x)[:, 0]
        return vmap(grad(u))(x)[:, 1] + value * along + other * turned - 0.01 * vmap(hessian(u))(x)[:, 0, 0]


class Drawn(nn.Module):
    """What draws under vmap: of a value that it maps, of one that it does not, by each kind of call."""

    def __init__(self, randomness: str) -> None:
        super().__init__()
        self.randomness, self.net = randomness, Net()

    def forward(self, x: Tensor) -> Tensor:
        def drawn(row: Tensor) -> Tensor:
            noise = torch.rand_like(row) + torch.randn(4, dtype=row.dtype) + functional.dropout(torch.ones(4, dtype=row.dtype), 0.5)
            noise = noise + functional.alpha_dropout(row, 0.25, True) + functional.gumbel_softmax(row, dim=0)
            if self.randomness == "different":
                noise = noise + torch.bernoulli(torch.sigmoid(row.detach())) + torch.normal(row.detach(), 1.0)
            return self.net((row + noise)[torch.randperm(4)])

        return vmap(drawn, randomness=self.randomness)(x)


LABELS = torch.arange(7) % 3
KINDS = torch.arange(21).reshape(7, 3) % 5
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "slopes": (Slopes, {"kinds": KINDS, "labels": KINDS % 3}),
    "learner": (Learner, {"x": normal(7, 4), "labels": LABELS}),
    "ensemble": (lambda: Ensemble(randomness="different", p=0.25), {"x": normal(7, 4)}),
    "ensemble of parts": (lambda: Ensemble((0, 0, 0), "same", 0.25), {"x": normal(3, 7, 4)}),
    "per sample": (PerSample, {"x": normal(7, 4), "labels": LABELS}),
    "equation": (Equation, {"x": normal(7, 2)}),
    "each draws": (lambda: Drawn("different"), {"x": normal(7, 4)}),
    "all draw once": (lambda: Drawn("same"), {"x": normal(7, 4)}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [broad(MESHES[0]), MESHES[1], broad("pp=2")])
def test_a_step_trains_through_transforms(name: str, mesh: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    step_means_itself(make(), inputs, mesh)


@pytest.mark.parametrize("name", ["ensemble", broad("per sample"), broad("slopes")])
def test_a_module_has_transforms(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    module_means_itself(make(), inputs, MESHES[1])
    module_means_itself(make(), inputs, MESHES[1], grad=False)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness_says_who_draws(randomness: str) -> None:
    """Three models of equal parameters: their outputs are equal where one draw is for all, and else each is one of its own."""
    torch.manual_seed(0)
    model, x = Ensemble(randomness=randomness, p=0.5), normal(7, 4)
    with torch.no_grad(), one_rank() as mesh:
        for stacked in model.parameters():
            stacked.copy_(stacked[:1].expand_as(stacked))
        first, second, third = meshc.compile(model, mesh, args=(x,))(x)
    assert torch.equal(first, second) == torch.equal(second, third) == torch.equal(first, third) == (randomness == "same")


class Kept(nn.Module):
    """A gradient through a checkpointed region, and through attention: on one device torch differentiates neither within torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.heads, self.checkpointed = Net(0.0), nn.Linear(4, 12), True

    def forward(self, x: Tensor) -> Tensor:
        def loss(h: Tensor) -> Tensor:
            q, k, v = self.heads(h).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            mixed = h + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            out: Tensor = checkpoint(self.net, mixed, use_reentrant=False) if self.checkpointed else self.net(mixed)
            return out.square().sum()

        return grad(loss)(x)


def test_a_program_differentiates_what_torch_does_not() -> None:
    torch.manual_seed(0)
    model, x = Kept(), normal(3, 5, 4)
    plain = copy.deepcopy(model)
    plain.checkpointed = False
    with sdpa_kernel(SDPBackend.MATH):
        wanted = plain(x)
        wanted.square().sum().backward()
    with one_rank() as mesh:
        found = meshc.compile(model, mesh, args=(x,))(x)
        found.square().sum().backward()
        torch.testing.assert_close(found, wanted)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_verify_says_that_the_model_does_not_run() -> None:
    program = meshc.compile(Kept(), meshc.Mesh("dp=2"), args=(normal(4, 5, 4),))
    line = r"on one device, raises RuntimeError: .*\n  in your model: test_inner_transforms.py:\d+ `.*checkpoint.*\n"
    with pytest.raises(meshc.StateError, match=rf"{line}.*\n.*leave torch.utils.checkpoint out"):
        meshc.verify(program)


class Refused(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.net, self.norm, self.bag = what, Net(), nn.BatchNorm1d(4), nn.EmbeddingBag(5, 4, mode="sum")
        self.steps = nn.GRU(4, 4, 2, dropout=0.25)

    def forward(self, x: Tensor) -> Any:
        rows = torch.arange(len(x)).unsqueeze(1).expand(-1, 4) % 5
        functions: dict[str, Callable[[], Any]] = {
            "draws": lambda: vmap(self.net)(x),
            "statistics": lambda: grad(lambda z: self.norm(z).square().sum())(x),
            "tangents": lambda: vmap(jacfwd(grad(lambda z: self.net.up(z).square().sum())))(x),
            "leaf": lambda: grad(lambda z: self.net.up(z.detach().requires_grad_()).sum())(x),
            "linearize": lambda: torch.func.linearize(self.net, x)[0],
            "functionalize": lambda: torch.func.functionalize(self.net)(x),
            "layers": lambda: grad(lambda z: self.steps(z)[0].square().sum())(x),
            "batched layers": lambda: vmap(lambda z: self.steps(z)[0])(x.unsqueeze(1)),
            "own function": lambda: grad(lambda z: flex_attention(*[z[None, None]] * 3).sum())(x),
            "second": lambda: grad(lambda z: self.bag(rows, per_sample_weights=z).square().sum())(x),
        }
        return functions[self.what]()


@pytest.mark.parametrize(
    "what, said",
    [
        ("draws", r'randomness="different"\), or one draw is for all, randomness="same"'),
        ("statistics", r"torch.func.functional_call with the buffers, or without any \(torch.func.replace_all_batch_norm_modules_\)"),
        ("tangents", r"write torch.func.jacrev for jacfwd"),
        ("leaf", r"leave requires_grad_\(\) out of what a transform of torch.func is given"),
        ("linearize", r"y, tangent = torch.func.jvp\(f, \(x,\), \(v,\)\)"),
        ("functionalize", r"leave functionalize out, and call the function itself"),
        ("layers", r"a layer each \(num_layers=1\), with nn.Dropout between"),
        ("batched layers", r"call it with the rows as a batch, outside of vmap"),
        ("own function", r"torch.autograd.grad\(y.sum\(\), x, create_graph=True\)"),
        ("second", r"has no second derivative\n.*write that operator out"),
    ],
)
def test_what_is_refused_says_what_to_write(what: str, said: str) -> None:
    """And leaves no transform behind: torch would take the rest of the process to stand within."""
    with pytest.raises((meshc.CaptureError, meshc.CompileError), match=rf"(?s)in your model: .*test_inner_transforms.py:\d+.*{said}"):
        meshc.compile(Refused(what), meshc.Mesh("dp=2"), args=(normal(4, 4),))
    assert torch.ones(2).requires_grad_().requires_grad


def test_a_base_that_is_a_submodule_needs_values() -> None:
    class Submodule(Ensemble):
        def __init__(self) -> None:
            super().__init__()
            self.only = self.base[0]

    program = meshc.compile(Submodule(), meshc.Mesh("dp=2"), args=(normal(4, 4),))
    with pytest.raises(meshc.StateError, match=r"only.up.weight.*\n.*functional_call reads.*self.base = \[base\]"):
        meshc.verify(program)
