"""Autocast lowered to casts, against torch's own autocast: bit for bit on the CPU, dtype for dtype on (fake) CUDA tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshc.errors import CompileError
from meshc.frontend.autocast_policy import DISPATCH_KEYS, INSIDE, POLICIES, Policy
from meshc.frontend.capture import TorchGraph, joint_graph, torch_graph
from meshc.passes.trace.lower_autocast import ENTER, EXIT, as_casts
from tests.models import FACTORIES

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture(autouse=True)
def _as_in_capture() -> Iterator[None]:
    """oneDNN off, as where meshc traces: with it, torch's LSTM is another operator, in another dtype."""
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# ---------------------------------------------------------------------------------------------------------------- canary: torch's lists


class Seen(Exception):
    """What reached an operator: its tensors' dtypes and its dtype arguments."""


class AtTheOperator(TorchDispatchMode):
    """Stops where the autocast kernel hands over to the operator."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "prim" or function is torch.ops.aten.to.dtype:
            return function(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        floating = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        raise Seen(floating, {leaf for leaf in leaves if isinstance(leaf, torch.dtype)})


def argument(kind: str, tensor: Callable[[], Tensor]) -> Any:
    """Some value of a schema's type; an autocast kernel looks at tensors only."""
    if kind in ("Tensor", "Optional[Tensor]"):
        return tensor()
    if kind == "List[Tensor]":
        return [tensor(), tensor()]
    if kind == "List[Optional[Tensor]]":
        return [torch.ones(2, dtype=torch.int64)]
    if kind.startswith("Optional"):
        return None
    scalars = {"int": 1, "number": 1, "SymInt": 1, "float": 1.0, "bool": False, "str": "same"}
    return scalars[kind] if kind in scalars else [scalars[kind.removeprefix("List[").removesuffix("]")]]


def reaches(device: str, name: str, dtype: torch.dtype) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """The dtypes with which torch's autocast kernel calls operator `name` when all its operands are `dtype`, in a bfloat16 region."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with FakeTensorMode():
        values = [(a, argument(str(a.type), lambda: torch.empty(2, dtype=dtype, device=device))) for a in function._schema.arguments]
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, BF16)
        try:
            with torch._C._AutoDispatchBelowAutograd(), AtTheOperator():
                function(*[v for a, v in values if not a.kwarg_only], **{a.name: v for a, v in values if a.kwarg_only})
        except Seen as seen:
            return seen.args  # type: ignore[return-value]
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])
    raise AssertionError(f"{name} was not called")


BEHAVIOUR = {
    # operands reach the operator as (from float32, from bfloat16), and with these dtype arguments
    ((BF16, BF16), ()): Policy.LOWER,
    ((F32, F32), ()): Policy.FLOAT32,
    ((F32, BF16), (F32,)): Policy.FLOAT32_RESULT,
    ((F32, BF16), ()): Policy.WIDEST,
}


@pytest.mark.parametrize("device", POLICIES)
def test_canary_the_lists_are_torchs(device: str) -> None:
    """If this fails after an update of torch: see TORCH_LIBRARY_IMPL(aten, Autocast...) in aten/src/ATen/autocast_mode.cpp."""
    key = DISPATCH_KEYS[device]
    registered = {name for name in torch._C._dispatch_get_all_op_names() if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
    registered.discard("aten::_cudnn_rnn")  # in CUDA builds; Policy.CUDNN stands for it
    assert {name for name, policy in POLICIES[device].items() if policy is not Policy.CUDNN} == registered
    assert not INSIDE[device].keys() & POLICIES[device].keys()


@pytest.mark.parametrize("device", POLICIES)
def test_canary_each_policy_is_what_torchs_kernel_does(device: str) -> None:
    wrong = {}
    for name, policy in POLICIES[device].items():
        if policy is Policy.CUDNN:
            continue
        if policy is Policy.REFUSED:
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                reaches(device, name, F32)
            continue
        (high, asked), (low, _) = reaches(device, name, F32), reaches(device, name, BF16)
        assert len(high) == len(low) == 1, name
        behaviour = BEHAVIOUR.get(((*high, *low), tuple(asked)))
        if behaviour is not policy:
            wrong[name] = behaviour
    assert wrong == {}


# ---------------------------------------------------------------------------------------------------------------- functions, one by one


def region_of(function: Any, args: Any, kwargs: Any, device: str, dtype: torch.dtype = BF16) -> tuple[TorchGraph, list[Tensor]]:
    """The graph of one call in one region, as Dynamo would leave it, and its inputs."""
    mode, graph = FakeTensorMode(), torch.fx.Graph()
    nodes: dict[int, torch.fx.Node] = {}
    inputs = list({id(leaf): leaf for leaf in tensors((args, kwargs))}.values())
    for position, leaf in enumerate(inputs):
        node = nodes[id(leaf)] = graph.placeholder(f"x{position}")
        node.meta["example_value"] = mode.from_tensor(leaf.detach()).requires_grad_(leaf.requires_grad)
    wired = pytree.tree_map(lambda leaf: nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf, (tuple(args), dict(kwargs)))
    enter = graph.call_function(ENTER, (device, dtype, True, None))
    call = graph.call_function(function, *wired)
    graph.call_function(EXIT, (enter,))
    graph.output(call)
    module = torch.fx.GraphModule({}, graph)
    module.meta["fake_mode"] = mode
    return TorchGraph(module, (), {}, [], {}, set(), {}, pytree.tree_structure(None), []), inputs


def weighted(outputs: list[Tensor]) -> Tensor:
    outputs = [out for out in outputs if out.requires_grad]
    return sum((out.double() * torch.linspace(0.5, 1.5, out.numel(), dtype=F64).view(out.shape)).sum() for out in outputs)  # type: ignore


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


Make = Callable[..., Tensor]


def square(t: Make) -> Tensor:
    return t(4, 4)


def image(t: Make) -> Tensor:
    return t(2, 4, 6, 6)


LABELS = torch.tensor([1, 0, 2])
SIGNS = torch.tensor([1, -1, 1])
FUNCTIONS: dict[str, Callable[[Make], tuple[Any, ...]]] = {
    # matrices
    "linear": lambda t: (F.linear, t(3, 4), t(5, 4), t(5)),
    "matmul": lambda t: (torch.matmul, t(2, 3, 4), t(4, 5)),
    "operator @": lambda t: (torch.Tensor.__matmul__, t(3, 4), t(4, 5)),
    "Tensor.mm": lambda t: (torch.Tensor.mm, t(3, 4), t(4, 5)),
    "mm of one tensor": lambda t: (lambda x: torch.mm(x, x), square(t)),
    "bmm": lambda t: (torch.bmm, t(2, 3, 4), t(2, 4, 5)),
    "baddbmm": lambda t: (torch.baddbmm, t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "addmm": lambda t: (torch.addmm, t(5), t(3, 4), t(4, 5)),
    "addbmm": lambda t: (torch.addbmm, t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "addmv": lambda t: (torch.addmv, t(3), t(3, 4), t(4)),
    "addr": lambda t: (torch.addr, t(3, 4), t(3), t(4)),
    "mv": lambda t: (torch.mv, t(3, 4), t(4)),
    "dot": lambda t: (torch.dot, t(4), t(4)),
    "einsum": lambda t: (torch.einsum, "bij,bjk->bik", t(2, 3, 4), t(2, 4, 5)),
    "tensordot": lambda t: (torch.tensordot, t(2, 3, 4), t(4, 5), 1),
    "multi_dot": lambda t: (torch.linalg.multi_dot, [t(2, 3), t(3, 4), t(4, 2)]),
    "inner": lambda t: (torch.inner, t(3, 4), t(5, 4)),
    "inv": lambda t: (torch.linalg.inv, square(t)),
    "cdist": lambda t: (torch.cdist, t(3, 4), t(5, 4)),
    # convolutions, pooling, resampling
    "conv1d": lambda t: (F.conv1d, t(2, 4, 6), t(3, 4, 3), t(3)),
    "conv2d": lambda t: (F.conv2d, image(t), t(3, 4, 3, 3), t(3)),
    "conv2d, same": lambda t: (lambda x, w: F.conv2d(x, w, padding="same"), image(t), t(3, 4, 3, 3)),
    "conv3d": lambda t: (F.conv3d, t(1, 2, 4, 4, 4), t(3, 2, 3, 3, 3)),
    "conv_transpose2d": lambda t: (F.conv_transpose2d, image(t), t(4, 3, 3, 3), t(3)),
    "max_pool2d": lambda t: (F.max_pool2d, image(t), 2),
    "avg_pool3d": lambda t: (F.avg_pool3d, t(1, 2, 4, 4, 4), 2),
    "adaptive_avg_pool2d": lambda t: (F.adaptive_avg_pool2d, image(t), 2),
    "interpolate, nearest": lambda t: (F.interpolate, image(t), 12),
    "interpolate, bilinear": lambda t: (F.interpolate, image(t), 12, None, "bilinear", False),
    "grid_sample": lambda t: (F.grid_sample, image(t), t(2, 3, 3, 2).tanh(), "bilinear", "zeros", False),
    "pad, reflect": lambda t: (F.pad, image(t), (1, 1, 1, 1), "reflect"),
    "pixel_shuffle": lambda t: (F.pixel_shuffle, image(t), 2),
    # norms and softmax
    "layer_norm": lambda t: (F.layer_norm, t(3, 4), (4,), t(4), t(4)),
    "rms_norm": lambda t: (F.rms_norm, t(3, 4), (4,), t(4)),
    "group_norm": lambda t: (F.group_norm, image(t), 2, t(4), t(4)),
    "batch_norm": lambda t: (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), image(t), t(4), t(4)),
    "normalize": lambda t: (F.normalize, t(3, 4)),
    "norm": lambda t: (torch.norm, t(3, 4)),
    "vector_norm": lambda t: (torch.linalg.vector_norm, t(3, 4)),
    "softmax": lambda t: (F.softmax, t(3, 4), -1),
    "softmax, dtype": lambda t: (lambda x: F.softmax(x, -1, dtype=BF16), t(3, 4)),
    "log_softmax": lambda t: (torch.Tensor.log_softmax, t(3, 4), -1),
    "logsumexp": lambda t: (torch.logsumexp, t(3, 4), -1),
    "cosine_similarity": lambda t: (F.cosine_similarity, t(3, 4), t(3, 4)),
    # reductions and pointwise
    "sum": lambda t: (torch.sum, t(3, 4)),
    "Tensor.sum": lambda t: (torch.Tensor.sum, t(3, 4), -1),
    "mean": lambda t: (torch.mean, t(3, 4)),
    "prod": lambda t: (torch.prod, t(3, 4)),
    "cumsum": lambda t: (torch.cumsum, t(3, 4), 0),
    "var": lambda t: (torch.var, t(3, 4)),
    "exp": lambda t: (torch.exp, t(3, 4)),
    "rsqrt": lambda t: (torch.rsqrt, t(3, 4).abs() + 1),
    "operator **": lambda t: (torch.Tensor.pow, t(3, 4), 2),
    "softplus": lambda t: (F.softplus, t(3, 4)),
    "gelu": lambda t: (F.gelu, t(3, 4)),
    "prelu": lambda t: (F.prelu, t(3, 4), t(1)),
    "add": lambda t: (torch.add, t(3, 4), t(3, 4)),
    "addcmul": lambda t: (torch.addcmul, t(3, 4), t(3, 4), t(3, 4)),
    "atan2": lambda t: (torch.atan2, t(3, 4), t(3, 4)),
    "fft": lambda t: (torch.fft.rfft, t(3, 4)),
    # layout
    "cat": lambda t: (torch.cat, [t(3, 4), t(2, 4)]),
    "stack": lambda t: (torch.stack, [t(3, 4), t(3, 4)], 1),
    "index_put": lambda t: (torch.index_put, t(3, 4), (LABELS,), t(3, 4)),
    "scatter_add": lambda t: (torch.scatter_add, t(3, 4), 0, LABELS[:, None].expand(3, 4), t(3, 4)),
    # losses
    "cross_entropy": lambda t: (F.cross_entropy, t(3, 4), LABELS, t(4).abs()),
    "cross_entropy, smoothed": lambda t: (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), t(3, 4), LABELS),
    "cross_entropy, probabilities": lambda t: (lambda x, y: F.cross_entropy(x, y), t(3, 4), t(3, 4).abs()),
    "nll_loss": lambda t: (F.nll_loss, t(3, 4), LABELS),
    "mse_loss": lambda t: (F.mse_loss, t(3, 4), t(3, 4)),
    "l1_loss": lambda t: (F.l1_loss, t(3, 4), t(3, 4)),
    "smooth_l1_loss": lambda t: (F.smooth_l1_loss, t(3, 4), t(3, 4)),
    "kl_div": lambda t: (F.kl_div, t(3, 4), t(3, 4).abs()),
    "bce_with_logits": lambda t: (F.binary_cross_entropy_with_logits, t(3, 4), t(3, 4).abs()),
    "cosine_embedding_loss": lambda t: (F.cosine_embedding_loss, t(3, 4), t(3, 4), SIGNS),
    # attention, recurrence
    "attention": lambda t: (F.scaled_dot_product_attention, t(2, 2, 3, 4), t(2, 2, 3, 4), t(2, 2, 3, 4), t(3, 3)),
    "attention of one tensor": lambda t: (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), t(2, 2, 3, 4)),
    "multi-head attention": lambda t: multi_head(t, None),
    "multi-head attention, masked": lambda t: multi_head(t, t(3, 3)),
    "gru_cell": lambda t: (torch.gru_cell, t(2, 4), t(2, 3), t(9, 4), t(9, 3), t(9), t(9)),
    "lstm": lambda t: (
        torch.lstm, t(3, 2, 4), (t(1, 2, 3), t(1, 2, 3)), [t(12, 4), t(12, 3), t(12), t(12)], True, 1, 0.0, True, False, False,
    ),
}  # fmt: skip


def multi_head(t: Make, mask: Tensor | None) -> tuple[Any, ...]:
    x = t(3, 2, 4)
    in_weight, in_bias, out_weight, out_bias = t(12, 4), t(12), t(4, 4), t(4)

    def function(x: Tensor, mask: Tensor | None, *weights: Tensor) -> Any:
        w, b, v, c = weights
        return F.multi_head_attention_forward(x, x, x, 4, 2, w, b, None, None, False, 0.0, v, c, attn_mask=mask)

    return function, x, mask, in_weight, in_bias, out_weight, out_bias


def call_of(name: str, inputs: str) -> tuple[Any, tuple[Any, ...]]:
    """A function and its arguments: `inputs` is float32, bfloat16, or mixed, where they alternate."""
    torch.manual_seed(0)
    made = 0

    def make(*shape: int) -> Tensor:
        nonlocal made
        made += 1
        low = inputs == "bfloat16" or (inputs == "mixed" and made % 2)
        return torch.randn(shape).to(BF16 if low else F32).requires_grad_()

    function, *args = FUNCTIONS[name](make)
    return function, tuple(args)


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (RuntimeError, TypeError, IndexError) as error:  # an operator may lack the dtype; then it must lack it here too
        return error


@pytest.mark.parametrize("inputs", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cpu_values_and_gradients_are_torchs_bit_for_bit(name: str, inputs: str) -> None:
    function, args = call_of(name, inputs)
    traced, leaves = region_of(function, args, {}, "cpu")

    def reference() -> Any:
        with torch.autocast("cpu", BF16):
            return function(*args)

    want = attempt(reference)
    if isinstance(want, Exception):
        with pytest.raises((CompileError, RuntimeError)):
            torch.fx.Interpreter(as_casts(traced).module).run(*leaves)
        return
    got = torch.fx.Interpreter(as_casts(traced).module).run(*leaves)
    assert [same(a, b) for a, b in zip(tensors(got), tensors(want), strict=True)] == [True] * len(tensors(want))
    sources = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = [attempt(lambda out=out: torch.autograd.grad(weighted(tensors(out)), sources, allow_unused=True)) for out in (got, want)]
    if isinstance(gradients[1], Exception):
        assert str(gradients[0]) == str(gradients[1])
    else:
        assert all(same(a, b) for a, b in zip(*gradients, strict=True))


def on_fake_cuda(function: Any, args: Any) -> list[torch.dtype]:
    """The dtypes that torch's own CUDA autocast gives, without a GPU: its kernels run over fake CUDA tensors."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = pytree.tree_map(
            lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda") if isinstance(leaf, Tensor) else leaf, args
        )
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", BF16)
        try:
            return [leaf.dtype for leaf in tensors(function(*fakes))]
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
            torch.clear_autocast_cache()


WITHOUT_A_GPU_TORCH_CANNOT = ("grid_sample", "multi-head attention", "multi-head attention, masked", "gru_cell", "lstm")
"""Functions that want a CUDA context, or a kernel without a fake one, even for fake tensors."""


@pytest.mark.parametrize("inputs", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in WITHOUT_A_GPU_TORCH_CANNOT])
def test_cuda_dtypes_are_torchs(name: str, inputs: str) -> None:
    function, args = call_of(name, inputs)
    traced, _ = region_of(function, args, {}, "cuda")
    want = attempt(lambda: on_fake_cuda(function, args))
    if isinstance(want, Exception):
        assert "dtype" in str(want)
        with pytest.raises(CompileError, match="dtype"):
            as_casts(traced)
        return
    as_casts(traced)
    fakes = [node.meta["example_value"] for node in traced.module.graph.find_nodes(op="placeholder")]
    with traced.fake_mode, torch.no_grad():
        assert [leaf.dtype for leaf in tensors(torch.fx.Interpreter(traced.module).run(*fakes))] == want


# ------------------------------------------------------------------------------------------------------------------------- text, regions


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


# ------------------------------------------------------------------------------------------------------------------------------- errors


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


# ------------------------------------------------------------------------------------------------------------------------------- models


class OnRealTensors(torch.fx.Interpreter):
    """Runs a torch-level graph with the model's own parameters in place of the fake ones."""

    def __init__(self, graph: TorchGraph, model: nn.Module) -> None:
        super().__init__(graph.module)
        real = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.real = {id(fake): real[name] for name, fake in graph.tensors.items()}

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return self.real.get(id(value), value)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "resnet"])
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
