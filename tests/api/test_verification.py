"""`meshc.verify` checks the program that was compiled, wherever it is called from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.frontend import capture
from meshc.ir import spmd
from meshc.passes.trace import capture_model as first_pass
from meshc.program.program import PlainProgram as Compiled
from meshc.runtime.simulator import reference_comparison as verification
from meshc.runtime.simulator.plain_copy import ModelSnapshot
from meshc.runtime.simulator.sensitivity import RUNS, RoundingPerturbation
from meshc.runtime.simulator.simulation import simulate
from meshc.runtime.simulator.tensor_error import error
from tests.broad import broad
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401

BF16 = torch.bfloat16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("around", [False, True])
def test_autocast_is_what_was_around_the_compilation(around: bool) -> None:
    """Two halves of a contraction, each rounded to bfloat16 (8 bits), differ from the whole by about 2^-8; float32 would by 1e-7."""
    with torch.autocast("cpu", BF16):
        program = meshc.compile(model(), meshc.Mesh("tp=2"), args=(torch.randn(4, 64),), plan="tp: ffn")
    with torch.autocast("cpu", BF16) if around else nullcontext():
        report = meshc.verify(program)
    assert 1e-4 < report.worst <= report.tolerance == 2e-2


def test_autocast_around_verify_is_not_the_programs() -> None:
    program = meshc.compile(model(), meshc.Mesh("tp=2"), args=(torch.randn(4, 64),), plan="tp: ffn")
    with torch.autocast("cpu", BF16):
        report = meshc.verify(program)
    assert report.worst <= report.tolerance == 1e-5


@cache
def sensitive() -> tuple[meshc.Program, nn.Module, dict[str, torch.Tensor]]:
    """Norms over four rows, one after the other: each makes roundings of the one before larger."""
    torch.manual_seed(3)
    layers = [layer for _ in range(12) for layer in (nn.Linear(12, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU())]
    deep = nn.Sequential(*layers, nn.Linear(12, 3))
    inputs = {"input": torch.randn(4, 12), "target": torch.randint(3, (4,))}
    step = meshc.TrainStep(deep, optimizer=torch.optim.SGD(deep.parameters(), lr=0.01), loss=nn.functional.cross_entropy)
    return meshc.compile(step, meshc.Mesh("dp=2"), kwargs=inputs), deep, inputs


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.w).abs()


class Pyramid(nn.Module):
    """A list of levels that forward fills anew, as RAFT's correlations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.levels = nn.Linear(8, 4), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.levels = [self.linear(x)]
        self.levels.append(self.levels[0].square())
        return self.levels[0] + self.levels[1]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.filterwarnings("error:Casting complex values to real")
@pytest.mark.parametrize(
    "build, inputs",
    [
        (Complex, torch.ones(4, 8)),
        (lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)), torch.arange(8).reshape(4, 2)),
        (lambda: torch.nn.utils.weight_norm(nn.Linear(8, 4)), torch.ones(4, 8)),
        (Pyramid, torch.ones(4, 8)),
    ],
    ids=["complex parameters", "sparse gradients", "weight_norm", "a list of values"],
)
def test_models_of_less_common_kinds_in_both_precisions(build: Any, inputs: torch.Tensor) -> None:
    """Parameters of complex numbers; gradients that torch makes sparse; values of an earlier call, which torch does not copy."""
    torch.manual_seed(0)
    made = build()
    made(inputs)
    program = meshc.compile(made, meshc.Mesh("dp=2"), args=(inputs,))
    assert meshc.verify(program).ok
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10


def test_a_rate_that_is_a_tensor_rounds_nothing_in_float64() -> None:
    """The optimizer of the copy would round what it makes of the rate to float32, and the program does not."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    rate, betas = torch.tensor(1e-2), (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, foreach=False, capturable=True)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=nn.functional.mse_loss)
    program = meshc.compile(step, meshc.Mesh("dp=2"), args=(torch.randn(4, 6),), kwargs={"target": torch.randn(4, 4)})
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-13
    assert optimizer.param_groups[0]["lr"] is rate and rate.dtype == torch.float32


def test_both_parts_of_complex_numbers_count() -> None:
    wanted = torch.ones(4, dtype=torch.complex64)
    assert error(wanted, wanted, 0.0) == 0
    assert error(wanted + 0.5j, wanted, 0.0) == 0.5
    assert error(wanted.real, wanted, 0.0) == float("inf")


@pytest.mark.broad
def test_a_sensitive_model_is_judged_by_what_roundings_do_to_it_on_one_device() -> None:
    program, deep, inputs = sensitive()
    report = meshc.verify(program)
    assert report.ok and report.worst > report.tolerance and "the model is sensitive there, the program is not at fault" in str(report)
    assert meshc.verify(program, dtype=torch.float64).ok
    over = {name: error for kind, name, error in report.rows if kind == "gradient" and error > report.tolerance}

    def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), inputs["target"]).backward()
        return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}

    single = gradients(deep, inputs["input"])
    exact = gradients(copy.deepcopy(deep).double(), inputs["input"].double())
    floor = verification.FLOOR * max(float(value.abs().max()) for value in exact.values())
    own = max(error(single[name], exact[name], floor) for name in over)
    assert over and max(over.values()) < 6 * own  # torch's own float32 is as far from float64 as the program is from torch


@pytest.mark.parametrize("plant", ["scaled", broad("not reduced")])
def test_a_fault_does_not_hide_behind_sensitivity(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _, _ = sensitive()

    def wrong(compiled: Compiled, values: Mapping[str, Any], **how: Any) -> dict[str, torch.Tensor]:
        if plant == "scaled":
            found = simulate(compiled, values, **how)
            return {key: value * 1.001 if key.startswith("gradient:0.") else value for key, value in found.items()}
        for stage in compiled.stages.values():
            first = next((node for node in reversed(stage.graph.nodes) if node.target is spmd.all_reduce), None)
            if first is not None:
                first.replace_all_uses_with(first.args[0])
                stage.graph.erase_node(first)  # it would reduce over its operand, which is in its memory
        return simulate(compiled, values, **how)

    monkeypatch.setattr(verification, "simulate", wrong)
    with pytest.raises(meshc.VerifyError, match="does not mean what the model means|ranks disagree on"):
        meshc.verify(program)


def test_well_conditioned_models_keep_the_usual_bounds() -> None:
    report = meshc.verify(meshc.compile(model(), meshc.Mesh("tp=2"), args=(torch.randn(4, 64),), plan="tp: ffn"))
    assert not report.moved and {report.error_bound(kind, name) for kind, name, _ in report.rows} == {1e-5}


def test_perturbed_runs_change_what_rounds_by_units_in_the_last_place_and_nothing_else() -> None:
    x = torch.randn(64, 64)
    assert RUNS > 1
    with RoundingPerturbation(0):
        kept = [x.clone(), x.relu(), x.view(-1), x.to(torch.float64), torch.cat([x, x]), x.abs(), x > 0]
        moved = x * 2
    plain = [x, x.relu(), x.view(-1), x.double(), torch.cat([x, x]), x.abs(), x > 0]
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))
    assert 0 < float(((moved - 2 * x) / (2 * x)).abs().max()) <= 2 * torch.finfo(torch.float32).eps


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() * (2 if self.training else 3)


@pytest.mark.parametrize("dynamic", [False, broad(True)])
def test_a_step_is_traced_once_for_a_comparison_and_once_for_all_sizes(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its optimizer and without it the trace is one. What has another meaning is traced anew."""
    scaled = Scaled()
    options = meshc.Options(dynamic={"x": {0: torch.export.Dim("rows", max=64)}} if dynamic else {})
    step = meshc.TrainStep(scaled, optimizer=torch.optim.SGD(scaled.parameters(), lr=0.1, momentum=0.9), loss=lambda y: y.square().mean())
    program = meshc.compile(step, meshc.Mesh("dp=2"), kwargs={"x": torch.randn(6, 4)}, options=options)
    traced: list[object] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traced.append(args)
        return capture.torch_graph(*args, **kwargs)

    monkeypatch.setattr(first_pass, "torch_graph", counted)
    for rows in (6, 7, 3) if dynamic else (6,):
        report = meshc.verify(program, {"x": torch.randn(rows, 4)}, dtype=torch.float64)
        assert {"output", "gradient", "parameter after step 2"} <= {kind for kind, *_ in report.rows}
    assert len(traced) == 1
    meshc.verify(program, {"x": torch.randn(6, 4)})
    assert len(traced) == 2, "float32 is another program"
    scaled.eval()
    meshc.verify(program, {"x": torch.randn(6, 4)})
    assert len(traced) == 3, "so is one in evaluation"


class Lazy(nn.Module):
    """Makes a buffer when it first needs it, or anew for another length; and keeps what it has made beside its buffers."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.linear, self.first, self.table = nn.Linear(8, 8), first, None
        self.register_buffer("places", None if first == "registered" else torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.places is None or self.places.shape[0] != x.shape[1]:
            made = torch.arange(x.shape[1]).to(x)
            if self.first == "registered":
                self.register_buffer("places", made, persistent=False)
            elif self.first == "resized":
                self.places.resize_(x.shape[1]).copy_(made)
            else:
                self.places = made
        if self.table is None:
            self.table = torch.ones(x.shape[1])
        return (self.linear(x) * self.places[:, None] * self.table[:, None]).square().mean()


def stepped(model: nn.Module, *inputs: torch.Tensor, mesh: str = "dp=2") -> meshc.Program:
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), eps=1e-6), loss=lambda out: out)
    return meshc.compile(step, meshc.Mesh(mesh), args=inputs)


@pytest.mark.filterwarnings("ignore:the model's code changes Python values")
@pytest.mark.parametrize("first", ["registered", "assigned"])
def test_buffers_that_forward_makes(first: str) -> None:
    """Each comparison begins with what the model had; and the model itself is left as it was."""
    torch.manual_seed(0)
    model = Lazy(first)
    program = stepped(model, torch.randn(4, 6, 8))
    assert meshc.verify(program, dtype=torch.float64).ok and meshc.verify(program).ok
    assert model.table is None and (model.places is None if first == "registered" else model.places.shape == (1,))


def test_what_a_copy_holds_is_put_back() -> None:
    model = Lazy("resized")
    held = ModelSnapshot(model)
    with torch.no_grad():
        model(torch.ones(2, 3, 8))
        model.linear.weight.zero_()
    model.added = torch.ones(2)
    assert model.places.tolist() == [0.0, 1.0, 2.0] and model.table is not None
    held.put_back()
    assert model.places.tolist() == [0.0] and model.table is None and not hasattr(model, "added")
    assert model.linear.weight.abs().max() > 0


class Given(nn.Module):
    def __init__(self, then: Any) -> None:
        super().__init__()
        self.linear, self.then, self.shift = nn.Linear(8, 8), then, torch.linspace(0, 1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self, self.linear(x)).square().mean()


OF_NO_DTYPE: dict[str, Any] = {
    "eye": lambda m, h: h @ torch.eye(8),
    "an attribute": lambda m, h: h @ torch.diag(m.shift),
    "float()": lambda m, h: h * (torch.zeros(h.shape[0], 1).float().uniform_(0, 1) < 0.7).float(),
    "drawn": lambda m, h: h @ torch.rand(8, 8),
    "a number": lambda m, h: h @ (torch.ones(8, 8) * torch.tensor(0.3)),
    "least": lambda m, h: torch.where(h > 0, h, torch.full((), torch.finfo(h.dtype).min)).relu(),
}


@pytest.mark.parametrize("name", OF_NO_DTYPE)
def test_tensors_of_no_dtype_are_double_in_a_double_copy(name: str) -> None:
    torch.manual_seed(0)
    report = meshc.verify(stepped(Given(OF_NO_DTYPE[name]), torch.randn(4, 8)), dtype=torch.float64)
    assert report.ok and report.tolerance == 1e-10 and not report.single


IN_SINGLE: dict[str, tuple[Any, str]] = {
    "a product that has no double": (lambda m, h: h @ torch.eye(8).type("torch.FloatTensor"), "products of different dtypes"),
    "a sum in single": (lambda m, h: h.type("torch.FloatTensor").exp().sum(0), "computes in float32 in its copy in double precision too"),
}


@pytest.mark.parametrize("name", IN_SINGLE)
def test_what_has_no_double_copy_is_compared_in_single_and_said_so(name: str) -> None:
    torch.manual_seed(0)
    then, why = IN_SINGLE[name]
    report = meshc.verify(stepped(Given(then), torch.randn(4, 8)), dtype=torch.float64)
    assert report.ok and report.tolerance == 1e-5
    assert why in report.single and "test_verification.py" in report.single
    assert f"compared in float32 and not in float64: {report.single}" in str(report)
