"""What a user gets wrong, and what the message says: one process, no process group."""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from tests.models import llama, mlp
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401

X = {"x": torch.ones(6, 24)}


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line that the message names
            y = y + 1
        return y


def test_data_dependent_control_flow_names_the_line() -> None:
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "the line that the message names" in text)
    with pytest.raises(meshc.CaptureError, match=rf"test_bad_input\.py:{line} in forward") as raised:
        meshc.compile(Branching(), meshc.Mesh("dp=2"), kwargs=X)
    assert "torch.where" in str(raised.value)


@pytest.mark.parametrize(
    "mesh, plan, said",
    [
        ("dp=2", "dq: batch", "dq"),
        ("dp=2,ep=2", None, "`ep: experts > batch` (role ep, recipe experts): the model has no routed experts"),
        ("dp=2", "dp: bach", "the model has no factor 'bach'; did you mean batch"),
        ("dp=2", "zero9", "there is no recipe 'zero9'; recipes are ddp,"),
        ("dp=2", "dp: batch\npin down.bais: -/dp", "down.bais"),
        ("pp=2", None, "axis pp=2: pipeline stages need the whole step, forward and backward"),
    ],
)
def test_a_mesh_or_plan_that_does_not_fit(mesh: str, plan: str | None, said: str) -> None:
    with pytest.raises(meshc.PlanError, match=re.escape(said)):
        meshc.compile(mlp().model, meshc.Mesh(mesh), plan=plan, kwargs=X)


def test_a_loss_that_calls_another_module() -> None:
    model, teacher = mlp().model, mlp().model
    step = meshc.TrainStep(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda output, raw: (output - teacher(raw)).square().mean(),
    )  # fmt: skip
    with pytest.raises(meshc.CaptureError, match="none of the model's: a loss, or the model itself, calls another module") as raised:
        meshc.compile(step, meshc.Mesh("dp=2"), kwargs={**X, "raw": X["x"]})
    assert "put both modules into one nn.Module" in str(raised.value)
    assert re.search(r"in your model: models\.py:\d+ ", str(raised.value))  # a line of the teacher


@pytest.mark.parametrize("way", [pickle.dumps, copy.deepcopy])
def test_a_program_is_no_pickle(way: Callable[[object], object]) -> None:
    with torch.no_grad():
        program = meshc.compile(nn.Linear(24, 4), meshc.Mesh("dp=2"), args=(X["x"],))
    with pytest.raises(meshc.StateError, match=r"program.save\(path\)"):
        way(program)


def test_all_faults_of_a_plan_at_once() -> None:
    with pytest.raises(meshc.PlanError) as raised:
        meshc.compile(mlp().model, meshc.Mesh("dp=2,tp=2"), plan="dp: bach\ntp: heds", kwargs=X)
    assert "'bach'" in str(raised.value) and "'heds'" in str(raised.value)


@pytest.mark.parametrize("word", ["inputs", "outputs", "backend"])
def test_words_that_are_not_known(word: str) -> None:
    with pytest.raises(meshc.PlanError, match=f"{word}='other' is not known: use '"):
        meshc.compile(mlp().model, meshc.Mesh("dp=2"), kwargs=X, **{word: "other"})


def test_options_that_are_not_known() -> None:
    with pytest.raises(meshc.PlanError, match="use 'mean' or 'sum'"):
        meshc.Options(local_inputs=meshc.LocalInputs(loss="max"))
    with pytest.raises(meshc.PlanError, match=r"memory_budget=0\): at least 1"):
        meshc.Options(memory_budget=0)
    with pytest.raises(meshc.PlanError, match=r"kept_sizes=0\)\): at least 1"):
        meshc.Options(debugging=meshc.Debugging(kept_sizes=0))
    with pytest.raises(meshc.PlanError, match=r"cache=3\): a folder, True or False"):
        meshc.Options(cache=3)  # type: ignore[arg-type]


def test_local_inputs_need_an_axis_of_data() -> None:
    with pytest.raises(meshc.PlanError, match="splits the batch along axes with a data role") as raised:
        meshc.compile(mlp().model, meshc.Mesh("tp=2"), kwargs=X, inputs="local")
    assert 'what to do: inputs="global"' in str(raised.value) and '"dp=1,tp=2"' in str(raised.value)
    meshc.compile(mlp().model, meshc.Mesh("dp=1,tp=2"), kwargs=X, inputs="local")


def test_what_is_the_models_is_not_looked_for_on_its_program() -> None:
    model = mlp().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs: list[Any] = [
        meshc.compile(model, meshc.Mesh("dp=2"), kwargs=X),
        meshc.compile(meshc.TrainStep(model, optimizer=optimizer), meshc.Mesh("dp=2")),
    ]
    for program in programs:
        with pytest.raises(AttributeError, match="what to do: keep both, .*write model.parameters") as raised:
            program.parameters()
        assert f"the {type(model).__qualname__} that was compiled stays the live object" in str(raised.value)
        assert not hasattr(program, "no_sync")
        with pytest.raises(AttributeError, match="a meshc.Program has no 'no_sync'$"):
            program.no_sync()
    function: Any = meshc.compile(lambda x: x + 1, meshc.Mesh("dp=2"))
    with pytest.raises(AttributeError, match="a meshc.Program has no 'parameters'$"):
        function.parameters()


def test_uneven_parts_are_parts() -> None:
    with pytest.raises(meshc.PlanError, match='each rank passes rows of its own, which is inputs="local"'):
        meshc.compile(mlp().model, meshc.Mesh("dp=2"), kwargs=X, options=meshc.Options(local_inputs=meshc.LocalInputs(uneven_rows=True)))


def test_a_trainable_module_needs_inputs() -> None:
    with pytest.raises(meshc.StateError, match=r"meshc.compile\(model, mesh, kwargs="):
        meshc.compile(mlp().model, meshc.Mesh("dp=2"))


@pytest.mark.parametrize("plan", ["zero1", "zero2"])
def test_partial_storage_is_for_a_train_step(plan: str) -> None:
    with pytest.raises(meshc.PlanError, match="compile meshc.TrainStep"):
        meshc.compile(mlp().model, meshc.Mesh("dp=2"), plan=plan, kwargs=X)
    with torch.no_grad():
        meshc.compile(mlp().model, meshc.Mesh("dp=2"), plan=plan, kwargs=X)


def test_without_a_process_group_nothing_runs_and_nothing_is_replaced() -> None:
    case = mlp()
    before = list(case.model.parameters())
    program = meshc.compile(case.model, meshc.Mesh("dp=2"), kwargs=X)
    with pytest.raises(meshc.StateError, match="without a process group"):
        program(**X)
    with pytest.raises(meshc.StateError, match="no state yet"):
        program.state_dict()
    assert all(a is b for a, b in zip(before, case.model.parameters(), strict=True))
    assert case.model(**X).shape == (6, 10)


def test_a_loss_that_shares_a_name_with_the_model() -> None:
    model = mlp().model
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters()), loss=lambda output, x: (output - x).mean())
    with pytest.raises(meshc.PlanError, match="x: both model.forward and the loss take this name"):
        meshc.compile(step, meshc.Mesh("dp=2"))


def test_a_step_without_a_loss() -> None:
    case = llama(layers=1)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters()))
    with pytest.raises(meshc.MeshcError, match="what to do: pass labels"):
        meshc.compile(step, meshc.Mesh("dp=2"), kwargs={"input_ids": case.kwargs["input_ids"]})
    with pytest.raises(meshc.PlanError, match="a step has at least one"):
        meshc.TrainStep(case.model, optimizer=step.optimizer, microbatches=0)


class LogitsAndLoss(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        logits = super().forward(input)
        return self.given(logits, logits.square().mean())


@pytest.mark.parametrize(
    "given, loss, todo",
    [
        (lambda logits, loss: (logits, loss), None, "loss=lambda out: out[1])"),
        (lambda logits, loss: {"logits": logits, "nll": loss}, None, "loss=lambda out: out['nll'])"),
        (lambda logits, loss: (logits, loss), lambda out: out, "loss=lambda out: out[1])"),
        (lambda logits, loss: (loss, loss), None, "loss=function)"),
    ],
)
def test_a_step_of_a_model_that_returns_logits_and_a_loss(given: Any, loss: Any, todo: str) -> None:
    model = LogitsAndLoss(4, 4)
    model.given = given
    with pytest.raises(meshc.MeshcError) as raised:
        step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters()), loss=loss)
        meshc.compile(step, meshc.Mesh("dp=2"), args=(torch.randn(4, 4),))
    assert f"what to do: TrainStep(..., {todo}" in str(raised.value) or f"give TrainStep(..., {todo}" in str(raised.value)


def test_a_program_whose_process_group_is_gone() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with torch.no_grad():
            program = meshc.compile(nn.Linear(24, 4), mesh, args=(X["x"],))
            assert program(X["x"]).shape == (6, 4)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(meshc.StateError, match="compile again under the new group"):
        program(X["x"])


@torch.library.custom_op("badlib::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("badlib::no_gradient", mutates_args=())
def no_gradient(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("badlib::other_fake", mutates_args=())
def other_fake(x: Tensor) -> Tensor:
    return x.sum(-1)


no_gradient.register_fake(torch.empty_like)
other_fake.register_fake(torch.empty_like)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def by_number(h: Tensor) -> Tensor:
    positive = h.gt(0).any().item()
    if positive:
        return h
    return -h


class Calls(nn.Module):
    layerdrop = 0.1

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(24, 24), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "function, x, said",
    [
        (torch.relu, torch.ones(6, 23), [
            "as one graph: an operator does not take what it is given: a and b must have same reduction dim, but got [6, 23] X [24, 24].\n"
            "  in your model: ", "what to do: call the model itself with these inputs"]),
        (lambda h: h.view(5, 7), torch.ones(6, 24), ["shape '[5, 7]' is invalid for input of size 144\n  in your model: "]),
        (lambda h: no_fake(h), torch.ones(6, 24), [
            "There was no fake impl registered for <CustomOpDef(badlib::no_fake)>\n  in your model: ",
            "what to do: give the operator a fake (register_fake)"]),
        (lambda h: no_gradient(h), torch.ones(6, 24), [
            "badlib.no_gradient at test_bad_input.py:", "has no gradient", "what to do: give the operator one (register_autograd)"]),
        (lambda h: h if random.uniform(0, 1) < 0.5 else -h, torch.ones(6, 24), [
            "test_bad_input.py:", "what to do: draw by torch (torch.rand([]))"]),
        (lambda h: h if torch.rand([]) < Calls.layerdrop else -h, torch.ones(6, 24), [
            "test_bad_input.py:", "what to do: set layerdrop (encoder_layerdrop, decoder_layerdrop) to 0"]),
        (by_number, torch.ones(6, 24), ["test_bad_input.py:", "what to do: replace the branch by"]),
        (lambda h: copy.deepcopy(h), torch.ones(6, 24), ["test_bad_input.py:", "what to do: copy tensors by x.clone()"]),
        (lambda h: Sum.apply(h, h), torch.ones(6, 24), ["test_bad_input.py:", "what to do: give a function of autograd each tensor once"]),
    ],
)  # fmt: skip
def test_what_the_model_cannot_be_called_with_is_said_once_with_its_line(
    function: Callable[[Tensor], Tensor], x: Tensor, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(meshc.CaptureError) as raised:
        meshc.compile(Calls(function), meshc.Mesh("dp=2"), kwargs={"x": x})
    assert [words for words in said if words not in str(raised.value)] == []
    assert "failed while attempting to run meta" not in capfd.readouterr().err, "torch's log of the same error"


@pytest.mark.filterwarnings("ignore:badlib.other_fake has no rule")
def test_a_fake_that_says_another_shape_than_its_operator_gives_is_named() -> None:
    with torch.no_grad():
        program = meshc.compile(Calls(lambda h: other_fake(h)), meshc.Mesh("dp=2"), kwargs={"x": torch.ones(6, 24)})
        with pytest.raises(meshc.CompileError) as raised:
            meshc.verify(program)
    assert re.match(
        r"badlib.other_fake at test_bad_input.py:\d+ is float32 \[6\] on a rank, and its fake says float32 \[6, 24\]", str(raised.value)
    )


def test_what_of_a_model_verify_cannot_copy_is_named() -> None:
    with torch.no_grad():
        program = meshc.compile(Calls(no_gradient), meshc.Mesh("dp=2"), kwargs={"x": torch.ones(6, 24)})
        with pytest.raises(meshc.StateError, match="^function cannot be copied, and verify compares with a copy of the model: TypeError"):
            meshc.verify(program)


def test_options_of_a_pipeline_without_one_are_noted() -> None:
    options = meshc.Options(pipeline=meshc.Pipelining(schedule="1f1b", stages_per_rank=2))
    program = meshc.compile(mlp().model, meshc.Mesh("dp=2"), kwargs=X, options=options)
    said = "Options(pipeline=Pipelining(schedule=, stages_per_rank=)) has no effect: the mesh dp=2 has no axis pp of two ranks or more"
    assert said in program.compiled.notes
