"""Dense masks that are provably causal, windowed or full are attributes of attention; others stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph
from transformers import MistralConfig, MistralForCausalLM

import meshc
from meshc.passes.trace import fold_masks
from meshc.passes.trace.fold_masks import Pattern, pattern_of
from meshc.report import summary
from tests.broad import broad
from tests.captured import Captured
from tests.models import Case, bert, gpt2, llama

ours = torch.ops.meshc
CAUSAL, FULL = Pattern(True), Pattern(False)
Seen = Callable[[Tensor, Tensor], Tensor]


def mistral(**sizes: Any) -> Case:
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=65, hidden_size=32, intermediate_size=56, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=4, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(65, (2, 12))
    return Case("mistral", MistralForCausalLM(config).train(), {"input_ids": ids, "labels": ids})


def attentions(graph: Graph) -> list[tuple[Any, ...]]:
    """(bias, causal, scale, window, offset) of each attention of the joint graph, forward then backward."""
    found = []
    for node in graph.nodes:
        if node.target is ours.attention.default:
            found.append(node.args[3:])
        elif node.target is ours.attention_backward.default:
            found.append((node.args[4], *node.args[7:]))
    return found


@pytest.mark.parametrize(
    "make,causal,extent",
    [
        broad(llama, True, (), id="llama"),
        broad(gpt2, True, (), id="gpt2"),
        broad(mistral, True, (4, 0), id="mistral"),
        broad(bert, False, (), id="bert"),
    ],
)
def test_stock_models_without_a_padding_mask(make: Callable[..., Case], causal: bool, extent: tuple[int, ...]) -> None:
    """No dense mask is left; queries are split under `cp: seq`, each rank's from where its tile begins."""
    case = make(batch=2, layers=1)
    case.model.eval()
    with torch.no_grad():
        program = meshc.compile(case.model, meshc.Mesh("cp=3"), kwargs=case.kwargs, plan="cp: seq")
        assert meshc.verify(program, dtype=torch.float64).ok
    ((bias, is_causal, _, *rest),) = attentions(program.lowered.placed.graph)
    assert (bias, is_causal, tuple(rest)) == (None, causal, extent)
    assert not any(12 * 12 <= _numel(node) and node.meta["meshc"].dtype == torch.bool for node in _values(program.lowered.placed.graph))


def _values(graph: Graph) -> list[Any]:
    return [node for node in graph.nodes if node.op == "call_function" and not isinstance(node.meta["meshc"], tuple)]


def _numel(node: Any) -> int:
    return torch.Size(node.meta["meshc"].shape).numel()


@pytest.mark.parametrize("make,extent", [broad(llama, (), id="llama"), broad(mistral, (4, 0), id="mistral")])
def test_training_under_a_folded_mask(make: Callable[..., Case], extent: tuple[int, ...]) -> None:
    source = Captured(make(batch=2, layers=1), train=True, double=True)
    found = attentions(source.traced.operators().graph)
    assert [(bias, causal, tuple(rest)) for bias, causal, _, *rest in found] == [(None, True, extent)] * 2
    for mesh, plan in (("cp=5", "cp: seq"), ("cp=2,tp=2", "ulysses+megatron_sp"), ("dp=2,tp=3", "fsdp+megatron")):
        source.verify_training(mesh, plan, lambda p: torch.optim.SGD(p, lr=0.1), steps=1)


def test_a_padding_mask_is_left_alone() -> None:
    case = bert(batch=2, layers=1, padded=True)
    case.model.eval()
    with torch.no_grad():
        program = meshc.compile(case.model, meshc.Mesh("dp=2"), kwargs=case.kwargs)
    ((bias, causal, *_),) = attentions(program.lowered.placed.graph)
    assert bias is not None and not causal


class Attention(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x)).transpose(1, 2).flatten(2)


def square(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[1], x.shape[1], dtype=torch.bool)


def lowered(x: Tensor) -> Tensor:
    """As many models write it: the least number above the diagonal."""
    return x.new_full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Any, ...] | None]] = {
    "triangle": (lambda x: square(x).tril(), (True,)),
    "least number": (lowered, (True,)),
    "window": (lambda x: square(x).tril() & square(x).triu(-2), (True, 3, 0)),
    "full": (square, (False,)),
    "by head": (lambda x: torch.stack([square(x).tril(), square(x)]), None),
    "both sides": (lambda x: square(x).tril(1) & square(x).triu(-1), None),
    "of the input": (lambda x: square(x).tril() | (x[0, :, 0] > 9), None),
}
EVERY_TIME = ("triangle", "window", "of the input")


@pytest.mark.parametrize("name", [name if name in EVERY_TIME else broad(name) for name in MASKS])
def test_masks_written_by_hand(name: str) -> None:
    mask, wanted = MASKS[name]
    torch.manual_seed(0)
    x = {"x": torch.randn(2, 7, 8).double()}
    program = meshc.compile(Attention(mask).double(), meshc.Mesh("cp=3"), kwargs=x, plan="cp: seq", names={"x": ("batch", "seq", None)})
    assert meshc.verify(program, dtype=torch.float64).ok
    for bias, causal, _, *rest in attentions(program.lowered.placed.graph):
        assert (bias is None) == (wanted is not None)
        assert wanted is None or (causal, *rest) == wanted


def test_a_mask_too_large_to_evaluate_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_masks, "LARGEST", 48)
    x = {"x": torch.randn(2, 7, 8)}
    program = meshc.compile(Attention(MASKS["triangle"][0]), meshc.Mesh("cp=3"), kwargs=x, plan="cp: seq")
    assert all(found[0] is not None for found in attentions(program.lowered.placed.graph))


def test_causal_queries_are_not_gathered() -> None:
    """Keys and values are gathered for all queries, and their gradients scattered; queries stay where they are, as with a dense mask."""
    x = {"x": torch.randn(2, 8, 8)}
    how = {"plan": "cp: seq", "names": {"x": ("batch", "seq", None)}, "outputs": "dtensor"}
    kinds = []
    for name in ("triangle", "by head"):
        program = meshc.compile(Attention(MASKS[name][0]), meshc.Mesh("cp=2"), kwargs=x, **how)  # type: ignore[arg-type]
        kinds.append(sorted(use.kind for use in summary.collectives(program.compiled)))
    assert kinds[0] == kinds[1]
    assert "meshc.attention" in str(program) and "all_to_all" not in kinds[0]


def bias_of(queries: int, keys: int, seen: Seen) -> Tensor:
    at, key = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    return torch.where(seen(at, key), 0.0, -torch.inf)[None, None]


@pytest.mark.parametrize(
    "queries,keys,seen,pattern",
    [
        (5, 5, lambda i, j: j <= i, CAUSAL),
        (5, 5, lambda i, j: j >= 0 * i, FULL),
        (3, 7, lambda i, j: j <= i + 4, Pattern(True, 0, 4)),
        (3, 7, lambda i, j: (j <= i + 4) & (j > i + 1), Pattern(True, 3, 4)),
        (5, 5, lambda i, j: (j <= i) & (j > i - 2), Pattern(True, 2)),
        (5, 5, lambda i, j: (j <= i) & (j > i - 1), Pattern(True, 1)),
        (5, 5, lambda i, j: (j <= i) & (j > i - 5), CAUSAL),
        (5, 5, lambda i, j: (j <= i) & (j != 1), None),
        (5, 5, lambda i, j: (j - i).abs() < 2, None),
        (5, 5, lambda i, j: j >= i, None),
        (5, 5, lambda i, j: j <= i - 1, None),
        (5, 3, lambda i, j: j <= i, None),
    ],
)
def test_patterns(queries: int, keys: int, seen: Seen, pattern: Pattern | None) -> None:
    assert pattern_of(bias_of(queries, keys, seen), queries) == pattern


def test_a_bias_is_no_pattern() -> None:
    causal = bias_of(5, 5, lambda i, j: j <= i)
    assert pattern_of(causal - 0.5, 5) is None
    assert pattern_of(torch.where(causal == 0, 0.0, -1e4), 5) is None  # a weight of exp(-10000) is not none: scores may differ by more
    assert pattern_of(torch.where(causal == 0, 0.0, torch.nan), 5) is None


class Translator(nn.Module):
    """torch asks of the target's mask whether it is causal, by its values, unless `tgt_is_causal` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, reach: int) -> Tensor:
        near = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype).tril(reach)
        found: Tensor = self.layers(source, target, tgt_mask=near)
        return found


@pytest.mark.parametrize("reach", [broad(9), 1])
def test_a_mask_of_torchs_own_transformer_needs_no_hint(reach: int) -> None:
    """The causal one, and one that hides the next token alone."""
    torch.manual_seed(0)
    inputs = (torch.randn(2, 5, 16).double(), torch.randn(2, 6, 16).double(), reach)
    program = meshc.compile(Translator().double(), meshc.Mesh("dp=2,tp=2"), args=inputs)
    assert meshc.verify(program, inputs, dtype=torch.float64).worst < 1e-10
