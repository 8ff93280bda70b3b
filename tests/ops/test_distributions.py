"""Distributions: their moments and shapes at a fixed seed, the same draws in tiles, and what the reference answers torch's calls with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.errors import CompileError
from meshc.frontend.reference_random import ReferenceRandom
from meshc.ops import distributions
from meshc.ops.distributions import Draws
from meshc.ops.random import seed_step
from meshc.ops.random_calls import RAISED, draws
from meshc.ops.signatures import arguments_for
from meshc.passes.trace.stand_ins import LIES
from tests.broad import broad

COUNT = 200_000


def drawn(values: Callable[..., Tensor], *numbers: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return values(Draws.of(seed_step(11, 2), 5, [COUNT]), *numbers, dtype)


def distance(values: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov's: the largest difference between a sample's distribution and `cdf`."""
    ordered = values.double().sort()[0]
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    wanted = cdf(ordered)
    return float(torch.maximum((steps - wanted).abs(), (steps - 1 / len(ordered) - wanted).abs()).max())


NORMAL = torch.distributions.Normal(0.0, 1.0)
CONTINUOUS: list[tuple[Callable[..., Tensor], tuple[float, ...], Callable[[Tensor], Tensor]]] = [
    (distributions.uniform, (-1.0, 3.0), lambda x: (x + 1) / 4),
    (distributions.normal, (2.0, 0.5), lambda x: NORMAL.cdf((x - 2) / 0.5)),
    (distributions.exponential, (2.0,), lambda x: 1 - torch.exp(-2 * x)),
    (distributions.log_normal, (0.5, 0.25), lambda x: NORMAL.cdf((x.log() - 0.5) / 0.25)),
    (distributions.cauchy, (1.0, 2.0), lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values, numbers, cdf", CONTINUOUS, ids=[values.__name__ for values, _, _ in CONTINUOUS])
def test_continuous_distributions(
    values: Callable[..., Tensor], numbers: tuple[float, ...], cdf: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """1.95 / sqrt(n) is passed once in a thousand samples."""
    sample = drawn(values, *numbers, dtype=dtype)
    assert sample.dtype == dtype and sample.isfinite().all()
    assert distance(sample, cdf) < 1.95 / math.sqrt(COUNT)
    assert distance(sample, lambda x: cdf(x * 1.03)) > 1.95 / math.sqrt(COUNT)  # the test sees three percents


def test_counts() -> None:
    trials = drawn(distributions.geometric, 0.3)
    assert trials.min() == 1 and abs(float(trials.mean()) - 1 / 0.3) < 0.03
    for k in (1, 2, 5):
        assert abs(float((trials == k).double().mean()) - 0.3 * 0.7 ** (k - 1)) < 0.005
    dice = drawn(distributions.integers, -1, 5, dtype=torch.int64)
    shares = torch.bincount(dice + 1) / COUNT
    assert len(shares) == 6 and (shares - 1 / 6).abs().max() < 0.004
    wide = drawn(distributions.integers, 0, 1 << 53, dtype=torch.int64)
    assert wide.max() < 1 << 53 and wide.unique().numel() == COUNT
    assert (drawn(distributions.exponential, 1.0, dtype=torch.float32) > 0).all()
    with pytest.raises(ValueError, match="2\\^53"):
        drawn(distributions.integers, 0, (1 << 53) + 1)


def test_permutations_are_even() -> None:
    """Each of the six orders of three, in 6,000 calls."""
    counts: dict[tuple[int, ...], int] = {}
    for call in range(6000):
        found = tuple(distributions.permutation(Draws.of(seed_step(1), call, [3]), torch.int64).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 6 and all(abs(count - 1000) < 120 for count in counts.values())
    assert distributions.permutation(Draws.of(seed_step(1), 0, [50]), torch.int64).sort()[0].tolist() == list(range(50))


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(replacement: bool) -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0]).expand(COUNT // 10, 4)
    shape = distributions.multinomial_shape(list(weights.shape), 2, replacement)
    found = distributions.multinomial(Draws.of(seed_step(4), 0, shape), weights, 2, replacement)
    first, second = (torch.bincount(column, minlength=4) / len(found) for column in found.T)
    assert (first - torch.tensor([1, 0, 3, 4]) / 8).abs().max() < 0.012
    if replacement:
        assert (second - torch.tensor([1, 0, 3, 4]) / 8).abs().max() < 0.012
    else:
        assert (found[:, 0] != found[:, 1]).all() and not (found == 1).any()
        assert abs(float(second[0]) - (3 / 8 * 1 / 5 + 4 / 8 * 1 / 4)) < 0.012


ELEMENTWISE = [
    (distributions.exponential, (2.0,)),
    (distributions.cauchy, (0.0, 1.0)),
    (distributions.integers, (0, 9)),
    (distributions.geometric, (0.2,)),
]


@pytest.mark.parametrize("values, numbers", ELEMENTWISE, ids=[values.__name__ for values, _ in ELEMENTWISE])
def test_a_tile_draws_its_part_of_the_whole(values: Callable[..., Tensor], numbers: tuple[float, ...]) -> None:
    whole = values(Draws.of(seed_step(3, 1), 2, [7, 10]), *numbers, torch.float64)
    tile = values(Draws(seed_step(3, 1), 2, ([7, 10], [3, 4], [2, 5])), *numbers, torch.float64)
    torch.testing.assert_close(tile, whole[2:5, 5:9], rtol=1e-14, atol=0)


X = torch.linspace(-1, 2, 24).reshape(2, 3, 4)
CALLS: list[tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (F.feature_alpha_dropout, F.feature_alpha_dropout, (X, 0.3, True), {}),
    (torch.dropout_, torch.dropout_, (X, 0.3, True), {}),
    (torch.alpha_dropout_, torch.alpha_dropout_, (X, 0.3, True), {}),
    (torch.feature_dropout_, torch.feature_dropout_, (X, 0.3, True), {}),
    (torch.feature_alpha_dropout_, torch.feature_alpha_dropout_, (X, 0.3, True), {}),
    (torch.normal, torch.normal, (X, X.abs()), {}),
    (torch.normal, torch.normal, (X, 2.0), {}),
    (torch.normal, torch.normal, (1.0, X.abs()), {}),
    (torch.normal, torch.normal, (1.0, 2.0, (3, 2)), {}),
    (torch.randint, torch.randint, (7, (3, 2)), {}),
    (torch.randint, torch.randint, (-2, 7, (3, 2)), {"dtype": torch.int32}),
    (torch.randint, torch.randint, (), {"low": 1, "high": 4, "size": (5,)}),
    (torch.randint_like, torch.randint_like, (X, 5), {}),
    (torch.randint_like, torch.randint_like, (X, 2, 5), {"dtype": torch.int64}),
    (torch.randperm, torch.randperm, (9,), {}),
    (torch.multinomial, torch.multinomial, (X[0].abs(), 2), {}),
    (torch.multinomial, torch.multinomial, (X[0].abs(), 6, True), {}),
    (F.rrelu, F.rrelu, (X, 0.1, 0.4, True), {}),
    (torch.rrelu, torch.rrelu, (X, 0.1, 0.4, True), {}),
    (F.gumbel_softmax, F.gumbel_softmax, (X,), {"tau": 0.5}),
    (F.gumbel_softmax, F.gumbel_softmax, (X,), {"hard": True, "dim": 1}),
    ("bernoulli", torch.Tensor.bernoulli, (X, 0.3), {}),
    ("multinomial", torch.Tensor.multinomial, (X[0].abs(), 2), {}),
    ("bernoulli_", torch.Tensor.bernoulli_, (X, 0.3), {}),
    ("bernoulli_", torch.Tensor.bernoulli_, (X, X.sigmoid()), {}),
    ("uniform_", torch.Tensor.uniform_, (X, -1.0, 2.0), {}),
    ("uniform_", torch.Tensor.uniform_, (X,), {"to": 2.0}),
    ("normal_", torch.Tensor.normal_, (X, 1.0), {"generator": None}),
    ("exponential_", torch.Tensor.exponential_, (X, 2.0), {}),
    ("log_normal_", torch.Tensor.log_normal_, (X,), {}),
    ("cauchy_", torch.Tensor.cauchy_, (X, 1.0), {"sigma": 0.5}),
    ("geometric_", torch.Tensor.geometric_, (X, 0.2), {}),
]


@pytest.mark.parametrize("raised, call, args, kwargs", CALLS, ids=[str(getattr(call[0], "__name__", call[0])) for call in CALLS])
def test_raised_functions_give_what_the_reference_answers(
    raised: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    def fresh() -> list[Any]:
        return [argument.clone() if isinstance(argument, Tensor) else argument for argument in args]

    with ReferenceRandom(1, 2) as reference:
        expected = call(*fresh(), **kwargs)
    assert reference.calls == draws(raised, args, kwargs) == 1
    args, kwargs = arguments_for(RAISED[raised], raised, fresh(), kwargs, without=LIES)
    found = RAISED[raised](*args, **kwargs, seed_step=seed_step(1, 2), call=0)
    torch.testing.assert_close(found, expected)
    assert found.dtype == expected.dtype


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(5)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


MODELS: dict[str, Callable[[Tensor], Tensor]] = {
    "exponential": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in evaluation": lambda x: F.rrelu(x),
    "integers": lambda x: x * torch.randint(1, 5, (7, 1)) + torch.randint_like(x, 3),
    "permutation": lambda x: x[torch.randperm(7)] + torch.randn(7, 5)[torch.randperm(7)],
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 2)),
    "multinomial again": lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 9, replacement=True)),
    "categorical": lambda x: x[torch.arange(7), torch.distributions.Categorical(logits=x, validate_args=False).sample()],
    "normal": lambda x: x + torch.normal(x, x.abs()),
    "counts": lambda x: x * torch.empty_like(x).geometric_(0.3) + torch.empty_like(x).log_normal_(0.0, 0.5),
    "initial values": lambda x: x * nn.init.xavier_uniform_(torch.empty(7, 5)) + nn.init.kaiming_normal_(torch.empty(7, 5)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh, plan", [("a=2,b=3", "a: batch\nb: weight.0"), broad("a=4", "a: weight.0")])
def test_a_compiled_module_draws_what_the_module_draws(name: str, mesh: str, plan: str) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    program = meshc.compile(Model(MODELS[name]), meshc.Mesh(mesh), kwargs={"x": x}, plan=plan)
    assert meshc.verify(program, {"x": x}).rows
    assert program.compiled.notes == []


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layers = kind(5, 4, num_layers=3, dropout=0.4, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.layers(x)


@pytest.mark.parametrize(
    "kind, first",
    [(nn.RNN, True), broad(nn.LSTM, True), broad(nn.LSTM, False), broad(nn.GRU, True), broad(nn.GRU, False), broad(nn.RNN, False)],
)
def test_recurrent_layers_with_dropout_between_them(kind: type[nn.RNNBase], first: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, 5) if first else torch.randn(3, 7, 5)
    model = Recurrent(kind, batch_first=first, bidirectional=first)
    names = {"x": ("batch", "seq", None) if first else ("seq", "batch", None)}
    program = meshc.compile(model, meshc.Mesh("dp=2"), kwargs={"x": x}, names=names)
    assert meshc.verify(program, {"x": x}).worst < 1e-5
    assert program.compiled.info["random_calls"] == 2


class Noisy(nn.Module):
    """A loss that draws with operators of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rrelu(self.first(x), training=True)
        h = F.gumbel_softmax(self.second(h[torch.randperm(x.shape[0])]), dim=-1)
        return (h * torch.empty_like(h).exponential_()).square().mean()


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", broad("dp=3")])
def test_every_step_draws_anew_as_the_reference_does(mesh: str) -> None:
    """Losses and parameters of three steps, each with its own number; a checkpoint keeps that number, and with it the stream."""
    torch.manual_seed(0)
    model = Noisy().double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs={"x": torch.randn(8, 5).double()})
    rows = meshc.verify(program, {"x": torch.randn(8, 5).double()}, dtype=torch.float64).rows
    assert {kind for kind, _, _ in rows} >= {"loss of step 0", "loss of step 2", "parameter after step 2"}


UNDEFINED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: torch.poisson(x.abs()), "poisson"),
    (lambda x: torch.binomial(x * 0 + 3, x.sigmoid()), "binomial"),
]


@pytest.mark.parametrize("function, name", UNDEFINED, ids=[name for _, name in UNDEFINED])
def test_what_has_no_definition_is_refused_with_its_line(function: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.raises(CompileError, match=rf"{name}\(\) at .*test_distributions.py:\d+") as refused:
        meshc.compile(Model(function), meshc.Mesh("a=2"), kwargs={"x": torch.randn(4, 5)}, plan="a: batch")
    assert "not known beforehand" in str(refused.value)
