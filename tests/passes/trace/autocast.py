"""What tests of autocast share: as a capture runs, with random numbers that stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshc.frontend.capture import TorchGraph
from meshc.passes.trace.lower_autocast import ENTER, EXIT

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@contextmanager
def as_in_capture() -> Iterator[None]:
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
