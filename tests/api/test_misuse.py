"""What a user gets wrong, one row each: the class of the error, and words that must stand in it. Nothing of torch's comes through raw."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize
from torch.nn.utils import rnn

import meshc
from meshc.errors import CompilerFault
from meshc.frontend import faults, trace_errors
from meshc.passes import pipeline
from meshc.passes.phases.compiler_pass import Pass
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import TracedModel
from tests.meaning.checks import one_rank

X = torch.arange(32.0).reshape(4, 8) / 16
HERE = Path(__file__).name


class Layer(nn.Module):
    """`body` is what its forward does."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(8, 4), body

    def forward(self, x: Any, *more: Any) -> Any:
        return self.body(self.linear, x, *more)


def item(linear: Any, x: Tensor) -> Any:
    return linear(x).repeat(x.sum().item(), 1)  # line of item


def to_int(linear: Any, x: Tensor) -> Any:
    return linear(x)[: int(x.sum())]  # line of to_int


def to_list(linear: Any, x: Tensor) -> Any:
    return linear(x) * x[0].tolist()[0]  # line of to_list


def numpys(linear: Any, x: Tensor) -> Any:
    return linear(x) * float(x.numpy().mean())  # line of numpys


def nonzero(linear: Any, x: Tensor) -> Any:
    return linear(x).nonzero()  # line of nonzero


def masked(linear: Any, x: Tensor) -> Any:
    return linear(x)[x[:, :4] > 0].sort()[0].sum()  # line of masked


def masked_select(linear: Any, x: Tensor) -> Any:
    return torch.masked_select(linear(x), x[:, :4] > 0).std()  # line of masked_select


def where(linear: Any, x: Tensor) -> Any:
    return linear(x).sum() + torch.where(x > 0)[0]  # line of where


def unique(linear: Any, x: Tensor) -> Any:
    return linear(x) * torch.unique(x).sum()  # line of unique


def repeated(linear: Any, x: Tensor) -> Any:
    return linear(x).repeat_interleave(x[:, 0].long().abs(), 0)  # line of repeated


def counted(linear: Any, x: Tensor) -> Any:
    return linear(x) * torch.bincount(x.argmax(-1), minlength=4)  # line of counted


def counted_as_long(linear: Any, x: Tensor) -> Any:
    return linear(x) * torch.bincount(x.argmax(-1)).view(4)  # line of counted_as_long


def histogram(linear: Any, x: Tensor) -> Any:
    return linear(x) * torch.histogram(x.detach(), 4, range=(-3.0, 3.0))[0]  # line of histogram


def cond(linear: Any, x: Tensor) -> Any:
    y = linear(x)
    return torch.cond(y.sum() > 0, lambda a: a + 1, lambda a: a - 1, (y,))  # line of cond


def sparse(linear: Any, x: Tensor) -> Any:
    return linear(x.to_sparse()).sum()  # line of sparse


def packed(linear: Any, x: Tensor) -> Any:
    return linear(rnn.pack_padded_sequence(x[:, None], torch.ones(4), batch_first=True).data)  # line of packed


def backward(linear: Any, x: Tensor) -> Any:
    y = linear(x).sum()
    y.backward()  # line of backward
    return y


def address(linear: Any, x: Tensor) -> Any:
    return linear(x) if x.data_ptr() % 2 else linear(x) * 2  # line of address


def on_cuda(linear: Any, x: Tensor) -> Any:
    return linear(x) + torch.ones(4, device="cuda")  # line of on_cuda


def opens(linear: Any, x: Tensor) -> Any:
    open("/dev/null").read()  # line of opens
    return linear(x)


def raises(linear: Any, x: Tensor) -> Any:
    raise ValueError("a batch of four is too small")  # line of raises


def looks_up(linear: Any, x: Tensor) -> Any:
    return linear(x) if "indexing" in torch.meshgrid.__kwdefaults__ else x  # line of looks_up


IN_FORWARD: dict[Callable[..., Any], str] = {
    item: "keep it a tensor",
    to_int: "keep it a tensor",
    to_list: "keep it a tensor",
    numpys: "keep it a tensor",
    nonzero: "keep the size fixed",
    masked: "indexing with a mask",
    masked_select: "torch.where(mask, x, 0)",
    where: "keep the size fixed",
    unique: "find unique values outside",
    repeated: "repeats rows as often as a tensor says",
    counted: "torch.nn.functional.one_hot(x, n).sum(0)",
    counted_as_long: "torch.nn.functional.one_hot(x, n).sum(0)",
    histogram: "torch.histc(x, bins, low, high)",
    cond: "compute both ways and take torch.where",
    sparse: "leave out to_sparse()",
    packed: "give the layer the padded tensor",
    backward: "meshc calls backward",
    address: "take the address out",
    on_cuda: "on the device of an input",
    opens: "take that call out of forward",
    raises: "it raises ValueError: a batch of four is too small",
    looks_up: "write that line in another way",
}


@pytest.mark.parametrize("body", IN_FORWARD, ids=lambda body: body.__name__)
def test_what_forward_may_not_do(body: Callable[..., Any]) -> None:
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# line of {body.__name__}"))
    with pytest.raises(meshc.CaptureError, match=rf"{HERE}:{line}\b") as raised:
        meshc.compile(Layer(body), meshc.Mesh("dp=2"), args=(X,))
    assert IN_FORWARD[body] in str(raised.value) and "what to do: " in str(raised.value)


def counts(linear: Any, x: Tensor) -> Any:
    chosen = linear(x).argmax(-1)
    weighted = torch.zeros(4, dtype=x.dtype).index_add(0, chosen, linear(x).sum(-1))
    return linear(x) * torch.nn.functional.one_hot(chosen, 4).sum(0) + weighted + torch.histc(x.detach(), 4, -3.0, 3.0)


@pytest.mark.parametrize("plan", ["dp: batch", "dp: -"])
def test_what_may_stand_for_counts(plan: str) -> None:
    program = meshc.compile(Layer(counts), meshc.Mesh("dp=2"), args=(X,), plan=plan)
    assert meshc.verify(program, dtype=torch.float64).ok


def plain() -> nn.Module:
    return nn.Linear(8, 4)


def wrapped(kind: type) -> nn.Module:
    """An instance of a wrapper that cannot be built here: with a process group, or a device."""
    made: nn.Module = kind.__new__(kind)
    nn.Module.__init__(made)
    made.module = plain()
    return made


class Views(nn.Module):
    def __init__(self, *parameters: Tensor) -> None:
        super().__init__()
        for index, value in enumerate(parameters):
            self.register_parameter(f"p{index}", nn.Parameter(value, requires_grad=value.is_floating_point() and value.dtype.itemsize > 1))

    def forward(self, x: Tensor) -> Tensor:
        return sum((x @ p.float().t() for p in self.parameters()), torch.zeros(()))


class WithTable(nn.Linear):
    """A table as a plain attribute."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(8, 4)
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.table, super().forward(x).t())


BIG = torch.ones(12, 8)
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "DataParallel": (lambda: nn.DataParallel(plain()), "torch's DataParallel, which splits work between devices itself"),
    "DistributedDataParallel": (lambda: wrapped(nn.parallel.DistributedDataParallel), "give meshc the module inside (model.module)"),
    "torch.compile": (lambda: torch.compile(plain()), "give meshc the module inside (model._orig_mod)"),
    "torch.compile inside": (lambda: nn.Sequential(torch.compile(plain())), "model.0 is what torch.compile has made of a module"),
    "ScriptModule": (lambda: torch.jit.script(plain()), "the module that torch.jit.script or torch.jit.trace was given"),
    "traced": (lambda: nn.Sequential(torch.jit.trace(plain(), X)), "model.0 is a TopLevelTracedModule of torch.jit"),
    "an exported module": (lambda: nn.Sequential(torch.export.export(plain(), (X,)).module()), "the module of an ExportedProgram inside"),
    "quantized": (lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(plain()), {nn.Linear}), "before it was quantized"),
    "observed": (lambda: nn.Sequential(plain(), FakeQuantize()), "model.1 is FakeQuantize of torch.ao, which nothing can trace"),
    "sparse, and no buffer": (lambda: WithTable(torch.eye(4, 8).to_sparse()), "table is sparse (torch.sparse_coo)"),
    "lazy": (lambda: nn.LazyLinear(4), "call the model once on an example"),
    "a class": (lambda: nn.Linear, "give meshc an instance: Linear(...)"),
    "a number": (lambda: 5, "not an int"),
    "a state dict": (lambda: plain().state_dict(), "not an OrderedDict"),
    "sparse": (lambda: Views(torch.eye(4, 8).to_sparse()), "p0 is sparse (torch.sparse_coo)"),
    "float8": (lambda: Views(torch.ones(4, 8).to(torch.float8_e4m3fn), BIG), "p0 is torch.float8_e4m3fn, in which nothing is computed"),
    "one memory": (lambda: Views(BIG[:8], BIG[4:]), "p0 and p1 are two tensors in one memory"),
    "expanded": (lambda: Views(torch.ones(1, 8).expand(4, 8)), "p0 is an expanded view"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_model_for_meshc(name: str) -> None:
    make, said = MODELS[name]
    with pytest.raises(meshc.StateError if name == "lazy" else meshc.CaptureError, match=re.escape(said)) as raised:
        meshc.compile(make(), meshc.Mesh("dp=2"), args=(X,))
    assert "what to do: " in str(raised.value)


def test_parameters_beside_each_other_in_one_memory_are_no_misuse() -> None:
    for pair in ((BIG[:4], BIG[4:8]), torch.ones(8, 16).chunk(2, 1)):
        meshc.compile(Views(*pair), meshc.Mesh("dp=2"), args=(X,))


@dataclasses.dataclass
class Fields:
    x: Tensor


class Thing:
    pass


PACKED = rnn.pack_padded_sequence(torch.ones(4, 5, 8), torch.tensor([5, 3, 2, 1]), batch_first=True)
INPUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy": (lambda: numpy.ones((4, 8)), "input x is a ndarray; what to do: pass a tensor: torch.from_numpy(x)"),
    "generator": (lambda: (row for row in X), "pass a list or a tuple"),
    "set": (lambda: {1, 2}, "input x is a set"),
    "dataclass": (lambda: Fields(X), "torch.utils._pytree.register_dataclass(Fields)"),
    "object": (Thing, "an input is a Thing, a class that torch cannot take apart"),
    "packed": (lambda: PACKED, "PackedSequence; what to do: pass the padded tensor"),
    "sparse": (lambda: X.to_sparse(), "input x is sparse (torch.sparse_coo)"),
    "csr": (lambda: X.to_sparse_csr(), "input x is sparse (torch.sparse_csr)"),
    "nested": (lambda: torch.nested.nested_tensor([X[:1], X], layout=torch.jagged), "input x is a nested tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), "dequantize() it before"),
    "float8": (lambda: X.to(torch.float8_e4m3fn), "input x is torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_input(name: str) -> None:
    make, said = INPUTS[name]
    with pytest.raises(meshc.InputError, match=re.escape(said)):
        meshc.compile(Layer(lambda linear, x: linear(X)), meshc.Mesh("dp=2"), args=(make(),))


@pytest.mark.parametrize(
    "given,said",
    [
        ({"args": X}, "args is a sequence of positional arguments, not a Tensor"),
        ({"kwargs": [X]}, "kwargs has arguments by name; it is a list"),
        ({"args": (X, X)}, "the call does not fit forward(input"),
        ({"kwargs": {"inputs": X}}, "the call does not fit forward(input"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(meshc.InputError, match=re.escape(said)):
        meshc.compile(plain(), meshc.Mesh("dp=2"), **given)


def test_inputs_of_another_dtype_than_the_parameters() -> None:
    with pytest.raises(meshc.CaptureError, match=rf"addmm at {HERE}:\d+ linear: float32 \[4\] and float64 \[4, 8\] and float32 \[8, 4\]"):
        meshc.compile(Layer(lambda linear, x: linear(x)), meshc.Mesh("dp=2"), args=(X.double(),))
    program = meshc.compile(Layer(lambda linear, x: linear(x.float())), meshc.Mesh("dp=2"), args=(X.double(),))
    assert meshc.verify(program).ok


def test_a_model_of_one_dtype_may_cast_to_float8_inside() -> None:
    program = meshc.compile(Layer(lambda linear, x: linear(x.to(torch.float8_e4m3fn).float())), meshc.Mesh("dp=2,tp=2"), args=(X,))
    assert meshc.verify(program).ok


def test_calls_of_a_program_with_what_has_no_values() -> None:
    with one_rank() as mesh:
        program = meshc.compile(Layer(lambda linear, x: linear(x)), mesh, args=(X,))
        with pytest.raises(meshc.InputError, match="x is a meta tensor: it has a shape and no values"):
            program(X.to("meta"))
        with pytest.raises(meshc.InputError, match="input x is sparse"):
            program(X.to_sparse())
        with pytest.raises(meshc.CaptureError, match="products of different dtypes"):
            program(X.double())
        assert program(X).shape == (4, 4)


def test_a_step_over_an_empty_batch() -> None:
    model = plain()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    with pytest.raises(meshc.InputError, match=r"an empty batch: input \[0, 8\], target \[0, 4\]\n.*NaN.*\n  what to do: skip"):
        meshc.compile(step, meshc.Mesh("dp=2"), args=(X[:0],), kwargs={"target": X[:0, :4]})
    with torch.no_grad():  # an inference of nothing is nothing
        assert meshc.verify(meshc.compile(model, meshc.Mesh("dp=2"), args=(X[:0],))).ok


@pytest.mark.parametrize(
    "make,said",
    [
        (lambda model, sgd: meshc.TrainStep(model, optimizer=sgd, loss="mse"), "the loss of a TrainStep is a function"),
        (lambda model, sgd: meshc.TrainStep(lambda x: x, optimizer=sgd), "a TrainStep trains a module"),
        (lambda model, sgd: meshc.TrainStep(nn.DataParallel(model), optimizer=sgd), "torch's DataParallel"),
    ],
    ids=["loss", "model", "wrapped"],
)
def test_steps_of_the_wrong_parts(make: Callable[..., Any], said: str) -> None:
    model = plain()
    with pytest.raises(meshc.MeshcError, match=said):
        meshc.compile(make(model, torch.optim.SGD(model.parameters(), lr=0.1)), meshc.Mesh("dp=2"), args=(X,))


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
@pytest.mark.parametrize(
    "model,why",
    [
        (lambda: nn.Sequential(plain(), nn.ReLU()).requires_grad_(False), "0.weight, 0.bias: requires_grad is False"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), "the model has no parameters"),
    ],
    ids=["frozen", "no parameters"],
)
def test_a_step_with_nothing_to_train(model: Callable[[], nn.Module], why: str, mesh: str) -> None:
    made = model()
    optimizer = torch.optim.SGD([*made.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    step = meshc.TrainStep(made, optimizer=optimizer, loss=lambda output: output.square().mean(), clip_grad_norm=1.0)
    with pytest.raises(meshc.CompileError, match=f"there is nothing to train\n  why: {why}\n  what to do: requires_grad_\\(True\\)"):
        meshc.compile(step, meshc.Mesh(mesh), args=(X,))


def test_an_exception_of_a_pass_names_the_pass_the_value_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a pass that fails on the node it works on, with an exception that is not meshc's."""

    def broken(traced: TracedModel) -> PlacedModel:
        for node in traced.operators().graph.nodes:
            if "relu" in str(node.target):
                raise IndexError("list index out of range")
        return pipeline.FACTORIZE.run(traced)

    monkeypatch.setattr(pipeline, "FACTORIZE", Pass("factorize", broken))
    with pytest.raises(CompilerFault) as raised:
        meshc.compile(Layer(lambda linear, x: F.relu(linear(x))), meshc.Mesh("dp=2"), args=(X,))
    assert isinstance(raised.value, meshc.CompileError) and isinstance(raised.value.__cause__, IndexError)
    first, where, *_, last = str(raised.value).splitlines()
    assert first == "compiling failed in the pass factorize at relu: IndexError: list index out of range"
    assert re.fullmatch(rf"  in your model: {HERE}:\d+", where)
    assert last.startswith("  what to do: ") and "report it" in last


def test_errors_of_meshc_pass_a_phase_as_they_are() -> None:
    for error in (meshc.PeerError("rank 3 failed"), meshc.PlanError("no factor"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, faults.phase("anything"):
            raise error
        assert raised.value is error


def test_many_of_a_kind_are_one_line() -> None:
    observers = nn.Sequential(plain(), FakeQuantize(), FakeQuantize(), FakeQuantize())
    with pytest.raises(meshc.CaptureError) as raised:
        meshc.compile(observers, meshc.Mesh("dp=2"), args=(X,))
    assert "model.1 is FakeQuantize" in str(raised.value) and "(so are 2 more); what to do: " in str(raised.value)
    assert len(str(raised.value).splitlines()) == 2


def test_a_detection_model_is_told_to_compile_its_backbone() -> None:
    line = 'File "/site/torchvision/models/detection/transform.py", line 177, in torch_choice'
    trace = f"data-dependent expression TruncToInt(zuf0)\nfrom user code:\n  {line}"
    said = str(trace_errors.explain_error(RuntimeError(trace), plain().forward, (X,), {}))
    assert "/detection/transform.py:177 in torch_choice" in said and "meshc.compile(model.backbone, mesh, args=(images,))" in said


@pytest.mark.parametrize("name, shown", [("input_ids", "kwargs=model.dummy_inputs)"), ("pixel_values", "kwargs={...example inputs...})")])
def test_a_stock_model_without_inputs_is_told_of_its_own_where_they_fit(name: str, shown: str) -> None:
    """transformers has tokens for every model, of images too."""
    model: Any = nn.Linear(2, 2)
    model.main_input_name, model.dummy_inputs = name, {"input_ids": X}
    with pytest.raises(meshc.StateError) as raised:
        meshc.compile(model, meshc.Mesh("dp=2"))
    assert shown in str(raised.value)
