"""What a loss function returns beside the loss, and what goes to it by position: on simulated ranks, against one device."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.frontend.train_step import loss_and_metrics, split_result
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        out = self.down(F.relu(self.up(x)))
        return out if scale is None else out * scale


class Simple(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(5, (8,), generator=torch.Generator().manual_seed(2))


def loss_and_more(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    rows = F.cross_entropy(output, target, reduction="none")
    right = output.argmax(-1) == target
    return rows.mean(), {
        "accuracy": right.float().mean(),
        "right": right.sum(),
        "largest": output.max(),
        "per_class": {"sum": output.sum(0), "all": rows},
        "rows": output.shape[0],
    }


def expected(model: nn.Module) -> dict[str, Tensor]:
    loss, more = loss_and_more(model(X), Y)
    nested = more.pop("per_class")
    rows = torch.tensor(more.pop("rows"))
    return {**{k: v.detach() for k, v in more.items()}, **{f"per_class.{k}": v.detach() for k, v in nested.items()}, "rows": rows}


def compiled(loss: Any, mesh: str = "dp=2", args: tuple[Any, ...] = (X, Y), model: nn.Module | None = None, **more: Any) -> Any:
    torch.manual_seed(0)
    model = model or Simple()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, **more)
    return meshc.compile(step, meshc.Mesh(mesh), args=args)


def found(program: Any) -> dict[str, Tensor]:
    """The metrics of one call on simulated ranks."""
    model = program.traced.module
    values = {f"parameter:{name}": p.detach() for name, p in model.named_parameters()} | {"input:x": X, "input:target": Y}
    values |= {p.key: torch.zeros((), dtype=torch.float64) for p in program.compiled.inputs if p.kind == "number"}
    outputs = simulate(program.compiled, {p.key: values[p.key] for p in program.compiled.inputs if p.kind != "constant"})
    return {key.partition(":")[2]: value for key, value in outputs.items() if key.startswith("metric:")}


@pytest.mark.parametrize("mesh, more", [("dp=2,tp=2", {}), ("dp=2", {"microbatches": 2}), broad("dp=3", {})])
def test_metrics_are_the_whole_batchs(mesh: str, more: dict[str, Any]) -> None:
    program = compiled(loss_and_more, mesh, **more)
    mine = found(program)
    wanted = expected(program.traced.module)
    assert mine.keys() == {*wanted, "grad_norm"}
    for name, value in wanted.items():
        assert mine[name].dtype == value.dtype
        torch.testing.assert_close(mine[name], value)
    assert [port.kind for port in program.compiled.outputs if port.name == "loss"] == ["output"]
    if more:
        rows = [row for row in meshc.verify(program).rows if row[0] == "metric"]
        assert {row[1] for row in rows} == wanted.keys()


def test_mean_of_parts() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(output, target), {"deviation": output.std()}

    program = compiled(loss, microbatches=2, batch_mix="mean_of_parts")
    model = program.traced.module
    torch.testing.assert_close(found(program)["deviation"], (model(X[:4]).std() + model(X[4:]).std()).detach() / 2)
    meshc.verify(program)
    with pytest.raises(meshc.CompileError, match=r"std at test_metrics.py:\d+ mixes the whole batch"):
        compiled(loss, microbatches=2)
    with pytest.raises(meshc.CompileError, match=r"it is one floating-point number: .*right is int64 \[\].*per_class.all is float32 \[4\]"):
        compiled(loss_and_more, microbatches=2, batch_mix="mean_of_parts")


Named = collections.namedtuple("Named", ["total", "entropy"])


@pytest.mark.parametrize(
    "result, names",
    [
        (lambda loss, y: (loss, y.mean()), ["1"]),
        (lambda loss, y: [loss, y.mean(), {"a": y.sum(), "none": None}], ["1", "2.a"]),
        (lambda loss, y: {"entropy": y.mean(), "loss": loss.reshape(1)}, ["entropy"]),
        (lambda loss, y: (loss, {"parts": [y.mean(), 3, True]}), ["parts.0", "parts.1", "parts.2"]),
        (lambda loss, y: Named(loss, y.mean()), ["1"]),
        (lambda loss, y: (loss, {}), []),
        (lambda loss, y: (loss,), []),
    ],
)
def test_names(result: Any, names: list[str]) -> None:
    found = loss_and_metrics(result(torch.tensor(2.0), torch.ones(3)))
    loss, metrics = split_result(found)
    assert loss.shape == () and loss.item() == 2.0 and list(metrics) == names
    assert isinstance(found, Tensor) == (not names)


def test_the_loss_itself_and_an_output_are_metrics() -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        value = F.cross_entropy(output, target)
        return value, {"itself": value, "output": output, "target": target}

    program = compiled(loss)
    mine, output = found(program), program.traced.module(X).detach()
    torch.testing.assert_close(mine["itself"], F.cross_entropy(output, Y))
    torch.testing.assert_close(mine["output"], output)
    assert torch.equal(mine["target"], Y)


def test_metrics_give_no_gradient() -> None:
    """A metric that would have one if it were differentiated: parameters move as without it."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, target), 1e3 * output.square().sum()

    with_it, without = compiled(loss), compiled(F.cross_entropy)
    torch.testing.assert_close(found(with_it)["grad_norm"], found(without)["grad_norm"])


@pytest.mark.parametrize(
    "result, words",
    [
        (lambda loss: (loss, {"grad_norm": loss}), "returns a metric 'grad_norm', which program.metrics has of every step"),
        (lambda loss: (loss, {"lr": loss}), "'lr'"),
        (lambda loss: (loss, {"what": "text"}), "the metric 'what' is a str"),
        (lambda loss: "text", "the loss function returned a str: return the loss"),
        (lambda loss: (loss.expand(3), {}), r"returned a loss of shape \[3\]; it must be one number"),
    ],
)
def test_refused(result: Any, words: str) -> None:
    with pytest.raises(meshc.MeshcError, match=words):
        compiled(lambda output, target: result(F.cross_entropy(output, target)))


# What goes to the loss.


def inputs_of(program: Any) -> list[str]:
    return [port.name for port in program.compiled.inputs if port.kind == "input"]


class WithWeight(nn.Module):
    def forward(self, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight)


class Several(Net):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + others[0])


class Star(Net):
    def forward(self, *xs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(xs[0])


def test_arguments_that_forward_has_no_place_for_go_to_the_loss() -> None:
    weight = torch.rand(5)
    assert inputs_of(compiled(nn.CrossEntropyLoss())) == ["x", "target"]
    assert inputs_of(compiled(F.cross_entropy, args=(X, Y, weight))) == ["x", "target", "weight"]
    assert inputs_of(compiled(WithWeight(), args=(X, Y, weight))) == ["x", "target", "weight"]
    program = compiled(F.cross_entropy, args=(X, torch.rand(5), Y), model=Net())
    assert inputs_of(program) == ["x", "scale", "target"]
    meshc.verify(program)
    meshc.verify(compiled(lambda output: output.square().mean(), args=(X, X), model=Several()))
    program = compiled(lambda output, *rest: F.cross_entropy(output, rest[0], rest[1]), args=(X, Y, weight))
    meshc.verify(program)


def test_what_forward_takes_goes_to_the_model() -> None:
    with pytest.raises(meshc.InputError, match="the loss cross_entropy was not given target") as caught:
        compiled(F.cross_entropy, args=(X, Y), model=Net())
    assert "model.forward takes x, scale" in str(caught.value) and "program(x, target=...)" in str(caught.value)
    with pytest.raises(meshc.InputError, match="was not given target"):
        compiled(F.cross_entropy, args=(X, Y), model=Star())


class Wrapped(nn.Module):
    """Hands on whatever it is given, as adapters and other wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Simple()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs)


@pytest.mark.broad
def test_names_go_to_a_model_that_takes_any_but_for_those_of_the_loss() -> None:
    model = Wrapped()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy)
    assert meshc.verify(meshc.compile(step, meshc.Mesh("dp=2"), kwargs={"x": X, "target": Y}), dtype=torch.float64).ok
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda output: output.square().mean())
    assert meshc.verify(meshc.compile(step, meshc.Mesh("dp=2"), kwargs={"x": X}), dtype=torch.float64).ok


def test_a_name_that_nobody_takes() -> None:
    model = Simple()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.CrossEntropyLoss())
    with pytest.raises(meshc.InputError, match=r"labels: neither model.forward\(x\) nor the loss CrossEntropyLoss\(output, target\) takes"):
        meshc.compile(step, meshc.Mesh("dp=2"), kwargs={"x": X, "target": Y, "labels": Y})
