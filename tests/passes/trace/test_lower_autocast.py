"""Autocast lowered to casts, against torch's own autocast: bit for bit on the CPU, dtype for dtype on (fake) CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshc.errors import CompileError
from meshc.frontend.capture import TorchGraph, joint_graph, torch_graph
from meshc.passes.trace.lower_autocast import ENTER, as_casts
from tests.broad import broad
from tests.models import FACTORIES
from tests.passes.trace.autocast import BF16, F16, F32, F64, as_in_capture, call_of, region_of, same


@pytest.fixture(autouse=True)
def _as_in_capture() -> Iterator[None]:
    with as_in_capture():
        yield


def traced(function: Callable[..., Any], *args: Tensor, module: nn.Module | None = None) -> TorchGraph:
    """What capture makes of `function(module, *args)`."""
    return torch_graph(module or nn.Module(), function, args, {}, signature=function, grad=True)


def text(graph: TorchGraph) -> list[str]:
    """One line for each call: `name = target(arguments)`, dtypes short."""
    lines = []
    for node in graph.module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            arguments = ", ".join(str(argument).removeprefix("torch.") for argument in node.args)
            lines.append(f"{node.name} = {target}({arguments})")
    return lines


def test_casts_stand_before_the_call_that_wants_them() -> None:
    def model(_: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            h = x @ w
            y = F.layer_norm(h, (4,))
        return y

    graph = as_casts(traced(model, torch.randn(4, 4), torch.randn(4, 4)))
    assert text(graph) == [
        "to = to(l_flat_args_0_, bfloat16)",
        "to_1 = to(l_flat_args_1_, bfloat16)",
        "h = matmul(to, to_1)",
        "to_2 = to(h, float32)",
        "y = layer_norm(to_2, (4,))",
    ]
    cast = graph.module.graph.find_nodes(op="call_method", target="to")[0]
    assert "h = x @ w" in cast.meta["stack_trace"]


def test_a_graph_without_regions_stays() -> None:
    graph = traced(lambda _, x: F.softmax(x @ x, -1), torch.randn(4, 4))
    before = text(graph)
    assert text(as_casts(graph)) == before


def test_float64_is_left_alone() -> None:
    graph, _ = region_of(torch.mm, (torch.randn(4, 4, dtype=F64), torch.randn(4, 4, dtype=F64)), {}, "cuda")
    assert text(as_casts(graph)) == ["mm = mm(x0, x1)"]


def test_a_call_that_casts_inside_becomes_its_aten_calls() -> None:
    t = torch.randn(3, 2, 4)
    graph, _ = region_of(*multi_head_with_weights(t), {}, "cuda")
    shown = ("to", "to_1", "to_2", "linear_default", "softmax_int")
    lines = [line for line in text(as_casts(graph)) if line.split(" = ")[0] in shown]
    assert lines == [
        "to = to(x0, bfloat16)",
        "to_1 = to(x1, bfloat16)",
        "to_2 = to(x2, bfloat16)",
        "linear_default = linear.default(to, to_1, to_2)",
        "softmax_int = softmax.int(to_3, -1)",
    ]
    softmax = graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)[0]
    assert softmax.meta["example_value"].dtype == F32  # CUDA's list; the CPU's lets it stay in bfloat16
    (dropout,) = graph.module.graph.find_nodes(op="call_function", target=torch.dropout)  # the name by which a later pass knows it
    assert dropout.args[1:] == (0.1, True)


def multi_head_with_weights(x: Tensor) -> tuple[Any, tuple[Any, ...]]:
    weights = torch.randn(12, 4), torch.randn(12), None, None, False, 0.1, torch.randn(4, 4), torch.randn(4)
    return F.multi_head_attention_forward, (x, x, x, 4, 2, *weights)


def test_regions_nest_and_may_be_off() -> None:
    def model(_: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", BF16):
            a = x @ x
            with torch.autocast("cuda", enabled=False):
                b = x @ x
            with torch.autocast("cuda", F16):
                c = x @ x
            with torch.autocast("cuda"):  # the dtype of the region around
                d = x @ x
        return a, b, c, d, x @ x

    graph = as_casts(traced(model, torch.randn(4, 4)))
    products = [node for node in graph.module.graph.nodes if getattr(node.target, "__name__", "") == "matmul"]
    assert [node.meta["example_value"].dtype for node in products] == [BF16, F32, F16, BF16, F32]


@pytest.mark.parametrize(("device", "dtype"), [(None, BF16), ("cpu", BF16), ("cuda", F32)])
def test_a_region_on_a_tensors_own_device_is_for_the_mesh(device: str | None, dtype: torch.dtype) -> None:
    """Capture's stand-ins lie on the CPU, whose list has no softmax; CUDA's has it."""

    def model(_: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, BF16):
            return F.softmax(x @ x, -1)

    graph = as_casts(traced(model, torch.randn(4, 4)), device)
    (softmax,) = [node for node in graph.module.graph.nodes if getattr(node.target, "__name__", "") == "softmax"]
    assert softmax.meta["example_value"].dtype == dtype


@pytest.mark.parametrize(("leaf", "cache", "casts"), [(True, True, 1), (True, False, 2), (False, True, 2)])
def test_a_leaf_is_cast_once_in_a_region(leaf: bool, cache: bool, casts: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16, cache_enabled=cache):
                weight = self.weight if leaf else self.weight * 2
                return F.linear(F.linear(x, weight), weight)

    model = Tied()
    graph = as_casts(traced(lambda model, x: model(x), torch.randn(4, 4), module=model))
    assert len(graph.module.graph.find_nodes(op="call_method", target="to")) == casts + 1  # and x's


def test_a_checkpoints_body_is_lowered_too() -> None:
    def model(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    graph = as_casts(traced(model, torch.randn(2, 4), module=nn.Linear(4, 4)))
    (body,) = [module for name, module in graph.module.named_children() if isinstance(module, torch.fx.GraphModule)]
    assert len(body.graph.find_nodes(op="call_method", target="to")) == 3
    joint = joint_graph(graph, {})
    (output,) = [node for node, kind in zip(joint_outputs(joint.module), joint.outputs, strict=True) if kind[0] == "output"]
    assert output.meta["val"].dtype == BF16


def joint_outputs(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])  # type: ignore[arg-type]


def test_what_torch_refuses_is_refused_with_its_place() -> None:
    def model(_: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            return F.binary_cross_entropy(x, y)

    with pytest.raises(CompileError, match=r"binary_cross_entropy\(\) at test_lower_autocast.py:\d+ .*torch refuses it"):
        as_casts(traced(model, torch.rand(4), torch.rand(4)))


def test_a_device_without_lists_is_refused() -> None:
    graph, _ = region_of(torch.mm, (torch.randn(4, 4), torch.randn(4, 4)), {}, "xpu")
    with pytest.raises(CompileError, match="not for xpu"):
        as_casts(graph)


def test_casts_inside_a_kernel_are_refused() -> None:
    graph, _ = region_of(F.bilinear, (torch.randn(3, 4), torch.randn(3, 4), torch.randn(2, 4, 4)), {}, "cpu")
    with pytest.raises(CompileError, match="inside the kernel of aten::_trilinear"):
        as_casts(graph)


@pytest.mark.parametrize(("dtype", "refused"), [(F16, False), (BF16, True)])
def test_recurrent_layers_on_cuda_run_in_float16_only(dtype: torch.dtype, refused: bool) -> None:
    function, args = call_of("lstm", "float32")
    graph, _ = region_of(function, args, {}, "cuda", dtype)
    if refused:
        with pytest.raises(CompileError, match="cuDNN runs recurrent layers in float16"):
            as_casts(graph)
        return
    (call,) = as_casts(graph).module.graph.find_nodes(op="call_function", target=torch.lstm)
    assert {node.meta["example_value"].dtype for node in call.all_input_nodes} == {F16}


def test_a_dtype_read_from_a_tensor_is_noted() -> None:
    def model(_: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            h = x @ x
            y = F.softmax(h.float(), -1)
            return y.to(h.dtype)  # as traced it is not what it is on the device

    graph = as_casts(traced(model, torch.randn(4, 4)))
    (note,) = graph.notes
    assert "return y.to(h.dtype)" in note and "torch.float32 here may be a tensor's dtype as traced" in note


class OnRealTensors(torch.fx.Interpreter):
    """Runs a torch-level graph with the model's own parameters in place of the fake ones."""

    def __init__(self, graph: TorchGraph, model: nn.Module) -> None:
        super().__init__(graph.module)
        real = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.real = {id(fake): real[name] for name, fake in graph.tensors.items()}

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return self.real.get(id(value), value)


@pytest.mark.parametrize("name", ["llama", broad("gpt2"), broad("bert"), broad("vit"), broad("resnet")])
def test_models_are_bit_equal_to_torchs_autocast(name: str) -> None:
    """The captured graph under torch's autocast, against the same graph lowered: losses and all gradients, dropout on."""
    case = FACTORIES[name]()
    if hasattr(case.model, "config"):
        case.model.config.use_cache = False
    inputs = case.call_kwargs

    def step(model: nn.Module, **inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return case.loss_of(model(**{key: inputs[key] for key in case.kwargs}))

    results = []
    for lowered in (False, True):
        graph = torch_graph(case.model, step, (), inputs, signature=step, grad=True)
        if lowered:
            assert as_casts(graph).notes == ()
            assert not graph.module.graph.find_nodes(op="call_function", target=ENTER)
        state = {key: value.clone() for key, value in case.model.state_dict().items()}
        torch.manual_seed(0)
        case.model.zero_grad()
        (loss,) = OnRealTensors(graph, case.model).run(*inputs.values(), enable_io_processing=False)
        loss.backward()
        case.model.load_state_dict(state)
        results.append({"loss": loss.detach(), **{key: p.grad.clone() for key, p in case.model.named_parameters()}})  # type: ignore
    assert [key for key in results[0] if not same(results[0][key], results[1][key])] == []
