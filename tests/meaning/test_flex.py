"""`flex_attention` in a model: whatever its functions do to scores, the program means what torch's own operator does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from meshc.errors import CaptureError, CompileError
from meshc.passes.trace import fold_masks
from meshc.report import summary
from tests.broad import broad
from tests.captured import Captured
from tests.meaning.checks import calls_alike, module_means_itself, one_rank, step_means_itself
from tests.meaning.test_masks import attentions
from tests.models import Case

ours = torch.ops.meshc
BATCH, SEQ, HEADS, HEAD = 2, 7, 4, 4
Mod = Callable[..., Tensor]
Heads = Callable[["Block", Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """torch's flex attention compiles itself wherever it is called, a handful of times in a process and then no more."""
    torch._dynamo.reset()


class Block(nn.Module):
    """Four query heads on two of keys and values; `attend(self, q, k, v, document)` is what a case is about."""

    def __init__(self, attend: Heads) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.q = nn.Linear(12, HEADS * HEAD)
        self.k, self.v = nn.Linear(12, 2 * HEAD), nn.Linear(12, 2 * HEAD)
        self.out = nn.Linear(HEADS * HEAD, 12)
        self.table = nn.Parameter(torch.randn(HEADS, 2 * SEQ))
        self.register_buffer("slopes", 0.5 ** torch.arange(1, HEADS + 1))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        q, k, v = (p(x).view(BATCH, SEQ, -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(self.attend(self, q, k, v, document).transpose(1, 2).flatten(2))


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def mask(function: Mod, batch: int | None = None, heads: int | None = None) -> BlockMask:
    return create_block_mask(function, batch, heads, SEQ, SEQ, device="cpu")


def masked(function: Mod, batch: int | None = None, heads: int | None = None) -> Heads:
    return lambda own, q, k, v, _: flex_attention(q, k, v, block_mask=mask(function, batch, heads), enable_gqa=True, scale=0.4)


def scored(make: Callable[[Block], Mod]) -> Heads:
    return lambda own, q, k, v, _: flex_attention(q, k, v, make(own), mask(causal), enable_gqa=True)


def of_documents(own: Block, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    same = mask(lambda b, h, i, j: (i >= j) & (document[b, i] == document[b, j]), BATCH)
    return flex_attention(q, k, v, block_mask=same, enable_gqa=True)


def partly_blind(own: Block, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    """The first three queries may look at nothing."""
    seen = mask(lambda b, h, i, j: (i > 2) & (document[b, i] >= document[b, j]), BATCH)
    return flex_attention(q, k, v, lambda s, b, h, i, j: s * 1.5, seen, enable_gqa=True)


def with_statistics(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    """Query 0 may look at nothing: its sum is 0, whose logarithm has no gradient."""
    out, more = flex_attention(
        q, k, v, block_mask=mask(lambda b, h, i, j: i > j), enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    return out + torch.sigmoid(more.lse)[..., None] - torch.sigmoid(more.max_scores)[..., None]


def narrow_values(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    """Keys and values of the first sample for all samples; values have heads of their own size."""
    out = flex_attention(q, k[:1], v[:1, ..., :3], block_mask=mask(causal, BATCH), enable_gqa=True, kernel_options={"BLOCK_M": 16})
    return torch.cat([out, out[..., :1]], -1)


CASES: dict[str, Heads] = {
    "plain": lambda own, q, k, v, _: flex_attention(q, k, v, enable_gqa=True),
    "causal": masked(causal),
    "window": masked(lambda b, h, i, j: (i >= j) & (i - j < 3)),
    "mask by head": masked(lambda b, h, i, j: (i >= j) & ((h % 2 == 0) | (i - j < 2)), heads=HEADS),
    "documents": of_documents,
    "blind": partly_blind,
    "alibi": scored(lambda own: lambda s, b, h, i, j: s - own.slopes[h] * (i - j)),
    "soft cap": scored(lambda own: lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0)),
    "table": scored(lambda own: lambda s, b, h, i, j: s + own.table[h, i - j + SEQ]),
    "statistics": with_statistics,
    "narrow": narrow_values,
}
EVERY_TIME = ("documents",)
"""The cases that every run tries, each against one of two: torch's form written out, and the operator itself."""
LEARNED = {"table"}
"""Cases that read the table."""


def block(name: str) -> Block:
    made = Block(CASES[name])
    if name not in LEARNED:
        del made.table
    return made


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(BATCH, SEQ, 12), "document": torch.tensor([[0] * 3 + [1] * 4, [0] * 5 + [1] * 2])}


def case(name: str) -> Case:
    return Case(name, block(name), inputs(), nn.functional.mse_loss, {"target": torch.randn(BATCH, SEQ, 12)})


@pytest.fixture
def differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operator itself, with its own gradient, which it refuses on a CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("name", [name if name in EVERY_TIME else broad(name) for name in CASES])
def test_every_mesh_means_what_the_model_means(name: str) -> None:
    """Heads over three, which do not divide, and batch; queries in tiles of four and three, which know where they begin."""
    source = Captured(case(name), train=True, double=True)
    for mesh, plan in (("dp=2,tp=3", None), ("cp=2", "cp: seq")):
        source.verify_training(mesh, plan, lambda p: torch.optim.SGD(p, lr=0.1), steps=1)


@pytest.mark.parametrize("name", [broad(name) for name in CASES if name != "statistics"])
def test_against_the_operator_itself(name: str, differentiable: None) -> None:
    """What `verify` compares with is torch's form of it written out; here it is the operator, called as a user calls it."""
    calls_alike(block(name), inputs(), calls=1)


LEFT_OUTSIDE = torch.rand(SEQ, SEQ) > 0.5


def test_a_mask_may_read_a_tensor_from_outside_of_the_model(differentiable: None) -> None:
    def attend(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask(lambda b, h, i, j: LEFT_OUTSIDE[i, j] | (i == j)), enable_gqa=True)

    for check in (partial(calls_alike, calls=1), partial(module_means_itself, mesh="cp=2")):
        made = Block(attend)
        del made.table
        check(made, inputs())


@pytest.mark.broad
def test_the_logarithm_against_the_operator_itself(differentiable: None) -> None:
    """Without the greatest scores, which torch gives on CUDA only."""

    def attend(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        out, more = flex_attention(q, k, v, block_mask=mask(causal), enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out + more.lse[..., None]

    made = Block(attend)
    del made.table
    calls_alike(made, inputs(), calls=1)


@pytest.mark.broad
def test_a_row_of_a_table_and_then_an_entry() -> None:
    """torch itself wants both in one bracket where it differentiates."""
    at_once = Block(CASES["table"])
    in_turn = Block(scored(lambda own: lambda s, b, h, i, j: s + own.table[h][i - j + SEQ]))
    found = []
    with one_rank() as mesh:
        for model in (at_once, in_turn):
            meshc.compile(model, mesh, kwargs=inputs())(**inputs()).square().sum().backward()
            found.append({name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0])
    assert bool(found[0]["table"].any())


@pytest.mark.parametrize(
    "name,extent", [("causal", (True,)), ("window", (True, 3, 0)), broad("plain", (False,))], ids=["causal", "window", "plain"]
)
def test_masks_are_folded(name: str, extent: tuple[Any, ...]) -> None:
    """One operator forward, one backward; no mask is left in the program, nor a table of its blocks."""
    made = block(name)
    program = meshc.compile(made, meshc.Mesh("tp=2"), kwargs=inputs())
    assert [(bias, causal, *rest) for bias, causal, _, *rest in attentions(program.lowered.placed.graph)] == [(None, *extent)] * 2
    assert not [node for node in program.lowered.placed.graph.nodes if "mask" in node.name or node.target is torch.ops.aten.where.self]
    assert {port.kind for port in program.compiled.inputs} == {"parameter", "input", "tangent"}


@pytest.mark.broad
def test_a_causal_mask_of_any_size_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is `i >= j` as it is written is not evaluated; others are where they are not too large."""
    monkeypatch.setattr(fold_masks, "LARGEST", 8)
    for name, folded in (("causal", True), ("window", False)):
        program = meshc.compile(block(name), meshc.Mesh("tp=2"), kwargs=inputs())
        assert [bias is None for bias, *_ in attentions(program.lowered.placed.graph)] == [folded] * 2


@pytest.mark.broad
def test_heads_are_split_where_attention_is_written_out() -> None:
    """As with attention whole: forward, one sum after `out`."""
    program = Captured(case("table"), train=True, double=True).program("tp=2", "tp: heads")
    lies = {port.name: str(port.sharding) for port in program.inputs if port.kind == "parameter"}
    assert "/tp" in lies["q.weight"].split(",")[0] and "/tp" in lies["k.weight"].split(",")[0]
    forward = [use for use in summary.collectives(program) if use.phase == "forward"]
    assert [use.kind for use in forward] == ["all_reduce"]


@pytest.mark.parametrize("name", [broad("causal"), broad("soft cap")])
def test_attention_is_a_region_however_it_is_written(name: str) -> None:
    program = module_means_itself(block(name), inputs(), "cp=2", "cp: heads@attention > seq")
    assert {use.kind for use in summary.collectives(program.compiled)} >= {"all_to_all"}


def test_a_step() -> None:
    step_means_itself(block("table"), inputs(), "dp=2,tp=2", "fsdp+megatron", microbatches=2)


class Cast(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.block = block(name)
        self.block.k.bias = None  # its gradient is nothing but rounding

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x, document)


@pytest.mark.parametrize("name", [broad("causal"), broad("soft cap"), broad("table")])
def test_under_autocast(name: str) -> None:
    """Queries, keys and values are cast; scores are float32, as torch keeps them."""
    program = meshc.compile(Cast(name), meshc.Mesh("tp=2"), kwargs=inputs())
    assert meshc.verify(program).ok
    if name != "causal":
        (softmax,) = program.lowered.placed.graph.find_nodes(op="call_function", target=torch.ops.aten._softmax.default)
        assert softmax.meta["meshc"].dtype == torch.float32
    else:
        (attention,) = program.lowered.placed.graph.find_nodes(op="call_function", target=ours.attention.default)
        assert attention.args[0].meta["meshc"].dtype == torch.bfloat16


@pytest.mark.broad
def test_in_a_checkpoint() -> None:
    def attend(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        def part(*heads: Tensor) -> Tensor:
            return flex_attention(*heads, lambda s, b, h, i, j: s * own.table[h, j], enable_gqa=True)

        return checkpoint(part, q, k, v, use_reentrant=False)

    module_means_itself(Block(attend), inputs(), "tp=2")


compiled_flex = torch.compile(flex_attention)


def test_compiled_by_the_model_itself() -> None:
    def attend(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return compiled_flex(q, k, v, score_mod=lambda s, b, h, i, j: s * own.table[h, j], enable_gqa=True)

    module_means_itself(Block(attend), inputs(), "tp=2")


@pytest.mark.broad
def test_a_mask_made_beforehand() -> None:
    """The tensor that its function holds is neither parameter nor buffer, and a constant of the program."""
    kinds = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    before = mask(lambda b, h, i, j: (kinds[i] == kinds[j]) & (i >= j))
    made = Block(lambda own, q, k, v, _: flex_attention(q, k, v, block_mask=before, enable_gqa=True))
    del made.table
    program = module_means_itself(made, inputs(), "cp=2", "cp: seq")
    assert [port.shape for port in program.compiled.inputs if port.kind == "constant"] == [(SEQ,)]


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 3 * HEADS * HEAD)

    def forward(self, x: Tensor, seen: BlockMask) -> Tensor:
        q, k, v = self.qkv(x).view(BATCH, SEQ, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, block_mask=seen)


@pytest.mark.broad
def test_a_mask_as_an_input() -> None:
    """Another mask is another program."""
    model, x = Given(), inputs()["x"]
    module_means_itself(model, {"x": x, "seen": mask(causal)}, "dp=2")
    with torch.no_grad(), one_rank() as mesh:
        wanted = [model(x, mask(function)) for function in (causal, lambda b, h, i, j: i <= j)]
        program = meshc.compile(model, mesh)
        found = [program(x, mask(function)) for function in (causal, lambda b, h, i, j: i <= j)]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("padded", [broad(False), broad(True)])
def test_a_stock_model(padded: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=65, hidden_size=32, intermediate_size=56, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, attn_implementation="flex_attention",
    )  # fmt: skip
    ids = torch.randint(65, (2, 12))
    given = {"input_ids": ids}
    if padded:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][0, -3:] = 0
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        program = meshc.compile(model, meshc.Mesh("dp=2,tp=2"), kwargs=given)
        assert meshc.verify(program, dtype=torch.float64).ok
    ((bias, is_causal, *_),) = attentions(program.lowered.placed.graph)
    assert (bias is not None, is_causal) == (padded, not padded)


def random_scores(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return flex_attention(q, k, v, lambda s, b, h, i, j: nn.functional.dropout(s, 0.5), enable_gqa=True)


def learned_mask(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    reach = own.table.sum()
    return flex_attention(q, k, v, block_mask=mask(lambda b, h, i, j: i - j < reach), enable_gqa=True)


def branching(own: Block, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return flex_attention(q, k, v, lambda s, b, h, i, j: s if s > 0 else 2 * s, enable_gqa=True)


@pytest.mark.parametrize(
    "attend,kind,words",
    [
        (random_scores, CompileError, ("score_mod of flex_attention()", "draws random numbers (dropout)", "noise[b, h, i, j]")),
        (learned_mask, CaptureError, ("Captured buffers from mask mod that require grad are not supported", "in learned_mask")),
        (branching, CaptureError, ("Data-dependent branching", "in <lambda>", "torch.where")),
    ],
)
def test_what_is_refused(attend: Heads, kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as raised:
        meshc.compile(Block(attend), meshc.Mesh("tp=2"), kwargs=inputs())
    assert "test_flex.py:" in str(raised.value)
    for word in words:
        assert word in str(raised.value)
