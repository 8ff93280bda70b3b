"""Every function of torch's that meshc puts another in the place of, called in every way that torch lets it be called."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

import meshc
from meshc.errors import CompilerFault
from meshc.frontend.capture import SEED_STEP, TorchGraph
from meshc.frontend.grouped_calls import _of_functional, _of_torch
from meshc.frontend.output_tree import OutputTree
from meshc.frontend.reference_random import ReferenceRandom
from meshc.ops import ctc, raised_draws
from meshc.ops.random import seed_step
from meshc.ops.random_calls import QUIET, RAISED
from meshc.ops.signatures import REQUIRED, Parameter, Signature, signatures
from meshc.passes.trace.raise_ops import COMPOSITES, raise_graph
from meshc.passes.trace.stand_ins import LIES
from meshc.private import FakeTensorMode

Values = dict[str, Any]
X = torch.linspace(0.05, 0.95, 24).reshape(2, 3, 4)
IDS = torch.tensor([[0, 2, 1], [1, 0, 3]])
ROWS, MATRICES = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(2, 8, 8, dtype=torch.bfloat16)
ENDS = torch.tensor([1, 3], dtype=torch.int32)

LSTM, GRU, TANH = nn.LSTM(4, 5, num_layers=2, bidirectional=True), nn.GRU(4, 5), nn.RNN(4, 5)
RELU = nn.RNN(4, 5, nonlinearity="relu")

ANY: Values = {
    "input": X, "size": (2, 3), "p": 0.3, "training": True, "train": True, "inplace": True, "requires_grad": False, "names": None,
    "generator": None, "layout": torch.strided, "device": "cpu", "pin_memory": False, "memory_format": torch.preserve_format,
    "dtype": torch.float64, "low": 1, "high": 5, "mean": 0.5, "std": 2.0, "from": -1.0, "to": 2.0, "lower": 0.1, "upper": 0.4,
    "fill_value": 0.5, "wrap": True,
}  # fmt: skip
"""What a parameter is given, by its name, where a function has nothing of its own for it."""
RECURRENT: Values = {
    "input": X, "has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False, "batch_first": False,
}  # fmt: skip
OWN: dict[Any, Values] = {
    torch.lstm: RECURRENT | {
        "hx": (torch.zeros(4, 3, 5), torch.ones(4, 3, 5)), "params": LSTM._flat_weights, "num_layers": 2, "dropout": 0.4,
        "bidirectional": True,
    },
    torch.gru: RECURRENT | {"hx": torch.ones(1, 3, 5), "params": GRU._flat_weights},
    torch.rnn_tanh: RECURRENT | {"hx": torch.ones(1, 3, 5), "params": TANH._flat_weights},
    torch.rnn_relu: RECURRENT | {"hx": torch.ones(1, 3, 5), "params": RELU._flat_weights},
    "fill_diagonal_": {"input": torch.rand(4, 4)},
    torch.rand: {"out": torch.zeros(2, 3)},
    torch.randn: {"out": torch.zeros(2, 3, dtype=torch.float64)},
    torch.bernoulli: {"out": torch.zeros(2, 3, 4)},
    torch.normal: {"size": (2, 3, 4), "out": torch.zeros(2, 3, 4)},
    torch.randperm: {"n": 7, "dtype": torch.int32, "out": torch.zeros(7, dtype=torch.int32)},
    torch.randint: {"dtype": torch.int32, "out": torch.zeros(2, 3, dtype=torch.int64)},
    torch.multinomial: {"num_samples": 2, "replacement": True, "input": X[0], "out": torch.zeros(3, 2, dtype=torch.int64)},
    "multinomial": {"num_samples": 2, "replacement": True, "input": X[0]},
    F.gumbel_softmax: {"logits": X, "tau": 0.5, "hard": True, "eps": 1e-9, "dim": 1},
    "exponential_": {"lambd": 2.0},
    "cauchy_": {"median": 1.0, "sigma": 0.5},
    F.scaled_dot_product_attention: {
        "query": X, "key": X + 1, "value": X + 2, "attn_mask": torch.ones(3, 3), "dropout_p": 0.4, "is_causal": None, "scale": 2.0,
        "enable_gqa": False,
    },
    F.cross_entropy: {
        "input": X[0], "target": IDS[0], "weight": X[0, 0], "size_average": None, "ignore_index": 2, "reduce": None, "reduction": "sum",
        "label_smoothing": 0.1,
    },
    F.embedding_bag: {
        "input": IDS, "weight": torch.ones(4, 2), "offsets": None, "max_norm": None, "norm_type": 1.0, "scale_grad_by_freq": False,
        "mode": "sum", "sparse": False, "per_sample_weights": None, "include_last_offset": False, "padding_idx": 0,
    },
    F.one_hot: {"input": IDS, "num_classes": 5},
    F.multi_head_attention_forward: {
        "query": X, "key": X + 1, "value": X + 2, "embed_dim_to_check": 4, "num_heads": 2, "in_proj_weight": torch.eye(12)[:, :4],
        "in_proj_bias": torch.ones(12), "bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.4,
        "out_proj_weight": torch.eye(4), "out_proj_bias": torch.ones(4), "training": True,
        "key_padding_mask": torch.tensor([[False, True]] * 3), "need_weights": False,
        "attn_mask": torch.ones(2, 2), "use_separate_proj_weight": False, "q_proj_weight": torch.eye(4), "k_proj_weight": torch.eye(4),
        "v_proj_weight": torch.eye(4), "static_k": None, "static_v": None, "average_attn_weights": False, "is_causal": None,
    },
    F.interpolate: {
        "input": X, "size": 8, "scale_factor": None, "mode": "linear", "align_corners": None, "recompute_scale_factor": None,
        "antialias": False,
    },
    **dict.fromkeys((torch.as_strided, "as_strided"), {"stride": (12, 5), "storage_offset": 1}),
    F.grouped_mm: {"mat_a": ROWS, "mat_b": MATRICES, "offs": ENDS, "bias": None, "out_dtype": None},
    torch._grouped_mm: {"input": ROWS, "mat2": MATRICES, "offs": ENDS, "bias": None, "out_dtype": None},
    F.dropout2d: {"input": X.unsqueeze(-1)},
    F.dropout3d: {"input": X.unsqueeze(-1).unsqueeze(-1)},
}  # fmt: skip
"""What a function's parameters are given; None: it has no second value that goes with the rest."""

ALWAYS: dict[Any, tuple[str, ...]] = {
    F.one_hot: ("num_classes",), F.interpolate: ("size",), F.grouped_mm: ("offs",), torch._grouped_mm: ("offs",),
}  # fmt: skip
"""Parameters whose default is none that goes with the rest, or that no trace takes."""
TARGETS: dict[Any, Any] = {**RAISED, **COMPOSITES}
ELSEWHERE = {"out0", "names", "batch_sizes"}
"""Parameters of overloads that torch's tracer does not take, or of which what is put in their place is torch's own."""


class Calls:
    """A torch-level graph of calls of one function, each on tensors of its own, as a trace makes it; and what torch gives for them."""

    def __init__(self, target: Any) -> None:
        self.target, self.graph, self.inputs, self.made = target, Graph(), list[Tensor](), list[Node]()
        self.mode, self.reference, self.expected = FakeTensorMode(), ReferenceRandom(1, 2), list[Any]()

    def add(self, args: list[Any], kwargs: Values) -> None:
        """`kwargs` without names are of torch's own call too."""
        fresh = [[_mapped(value, torch.clone) for value in (args, kwargs)] for _ in range(2)]
        with self.reference:
            self.expected.append(self._torchs(*fresh[0]))
        nodes = [_mapped(value, self._held) for value in (args, kwargs)]
        method = isinstance(self.target, str)
        node = self.graph.create_node("call_method" if method else "call_function", self.target, tuple(nodes[0]), nodes[1])
        fake = [_mapped(value, self.mode.from_tensor) for value in fresh[1]]
        with self.mode:
            node.meta["example_value"] = self._torchs(*fake)
        self.made.append(node)

    def _held(self, value: Tensor) -> Node:
        self.inputs.append(value.detach().clone())
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["example_value"] = self.mode.from_tensor(self.inputs[-1])
        return node

    def _torchs(self, args: Any, kwargs: Values) -> Any:
        return getattr(args[0], self.target)(*args[1:], **kwargs) if isinstance(self.target, str) else self.target(*args, **kwargs)

    def traced(self) -> TorchGraph:
        self.graph.output(self.made)
        module = GraphModule({}, self.graph)
        module.meta["fake_mode"] = self.mode
        return TorchGraph(module, (), {}, [], {}, set(), {}, OutputTree(None, {}))


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _mapped(each, function) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, function) for each in value])
    return function(value.detach()) if isinstance(value, Tensor) else value


def second(target: Any, parameter: Parameter) -> Any:
    """What a parameter is given beside its default."""
    values = ANY | OWN.get(target, {})
    assert parameter.name in values, f"nothing is known to give to {parameter.name} of {target}"
    value = values[parameter.name]
    return X if parameter.kind == "Tensor" and not isinstance(value, Tensor) else value


def _is_called(target: Any, signature: Signature) -> bool:
    """Whether torch's function takes what the operator's overload does, and its tracer too."""
    names = {p.name for p in signature}
    if names & ELSEWHERE or any(p.name in ("p", "high") and p.kind == "Tensor" for p in signature):
        return False
    return "out" not in names or "out" in OWN.get(target, {}) and "p" not in names and not {"input", "mean"} <= names


def calls_of(target: Any, signature: Signature) -> Iterator[tuple[list[Any], Values]]:
    """By position, by keyword, with each default left out and given: as it is, and as another value."""
    own = ["input"] if isinstance(target, str) else []
    needed = [p for p in signature if p.default is REQUIRED or p.name in ALWAYS.get(target, ())]
    values = {p.name: second(target, p) for p in needed}
    by_place = [p for p in signature if not p.keyword_only]
    yield [values[p.name] for p in by_place if p in needed], {p.name: values[p.name] for p in needed if p.keyword_only}
    at_start, named = [values[name] for name in own], {name: value for name, value in values.items() if name not in own}
    yield at_start, named
    for parameter in signature:
        if parameter not in needed and parameter.name != "from":  # a word of Python's, which no traced call has for a name
            if not (parameter.name == "dtype" and isinstance(parameter.default, int)):
                yield at_start, named | {parameter.name: parameter.default}
            if second(target, parameter) is not None:
                yield at_start, named | {parameter.name: second(target, parameter)}
    more = [p.default if second(target, p) is None and p not in needed else second(target, p) for p in by_place]
    yield more, {p.name: values[p.name] for p in needed if p.keyword_only}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: getattr(target, "__name__", target))
def test_called_in_every_way(target: Any) -> None:
    """What stands for each call gives what torch gives, from the same draws."""
    torch.manual_seed(0)
    calls = Calls(target)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for signature in signatures(target):
            if _is_called(target, signature):
                for args, kwargs in calls_of(target, signature):
                    calls.add(args, kwargs)
    found = raise_graph(calls.traced())
    assert found.random_calls == calls.reference.calls
    setattr(found.module, SEED_STEP, seed_step(1, 2))
    assert sum(node.target is target for node in found.module.graph.nodes) < len(calls.expected)
    torch.testing.assert_close(Interpreter(found.module).run(*calls.inputs), calls.expected)


TORCHS: dict[Any, Any] = {
    F.ctc_loss: ctc.loss_of_rows,
    torch._grouped_mm: _of_torch(torch._grouped_mm),
    F.grouped_mm: _of_functional(F.grouped_mm),
}
"""What stands where torch's functions are while a model is traced, or is the reference."""


@pytest.mark.parametrize(
    "target, function", [*TARGETS.items(), *QUIET.items(), *TORCHS.items()], ids=lambda one: getattr(one, "__name__", one)
)
def test_a_stand_in_has_torchs_signature(target: Any, function: Callable[..., Any]) -> None:
    """It takes what torch takes, by the same names, in the same order, with the same defaults."""
    own = [p for name, p in inspect.signature(function).parameters.items() if name not in ("seed_step", "call")]
    if any(p.kind is p.VAR_POSITIONAL for p in own):
        return  # all of torch's, in torch's order
    overloads = [[p for p in signature if p.name not in LIES] for signature in signatures(target) if _is_called(target, signature)]
    taken = {p.name for signature in overloads for p in signature}
    assert {p.name for p in own} in (taken, taken | {"inplace"})  # one stands for torch.rrelu too, which has none
    by_place = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    for signature in overloads:
        places = [p.name for p in signature if not p.keyword_only]
        assert places[: len(by_place)] == by_place[: len(places)]
        for torchs in signature:
            mine = next(p for p in own if p.name == torchs.name)
            if torchs.default is not REQUIRED and torchs.name != "dtype":
                assert mine.default == torchs.default


def test_what_is_given_beside_is_refused_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that drops an argument, as one did, gives another shape than torch."""
    monkeypatch.setitem(RAISED, torch.rand, lambda size, *, seed_step, call: raised_draws.uniform(seed_step, call, [], torch.float32))

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(size=x.shape)

    with pytest.raises(CompilerFault) as caught:
        meshc.compile(Noise(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3),))
    message = str(caught.value)
    assert "what stands for this call gives float32 [] strided on cpu, where torch gives float32 [4, 3] strided on cpu" in message
    assert "test_stand_ins.py" in message


class Keywords(nn.Module):
    """Calls as diffusers, CCT and people write them, and one that writes into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.register_buffer("noise", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        torch.rand(4, 6, out=self.noise)
        h = h + torch.rand(size=h.shape) + torch.randn(size=(4, 6), device=h.device) * self.noise
        heads = h.view(4, 2, 3)[:, None]
        h = h + F.scaled_dot_product_attention(query=heads, key=heads, value=heads).reshape(4, 6)
        shares = F.softmax(input=torch.matmul(input=heads, other=heads.transpose(dim0=-2, dim1=-1)), dim=-1)
        h = h + torch.matmul(input=shares, other=heads).reshape(4, 6)
        return F.dropout(input=F.softmax(input=h, dim=-1), p=0.2).square().mean()


def test_calls_by_keyword_mean_what_the_model_means() -> None:
    torch.manual_seed(0)
    model = Keywords()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out: out)
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=(torch.randn(4, 6),))
    assert meshc.verify(program, dtype=torch.float64).ok
