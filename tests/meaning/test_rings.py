"""Attention whose keys and values pass round a ring means what it means on one device, and moves and holds what the formulas say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import meshc
from meshc import artifact
from meshc.cost import peak_memory
from meshc.cost.devices import assume_device, device
from meshc.errors import PlanError
from meshc.ir import records, spmd
from meshc.ir.sizes import Dynamic, symbol
from meshc.optimizer.optimizer import describe
from meshc.program.program import PlainProgram
from meshc.report import summary
from meshc.rules.ring import ring_steps
from tests.broad import broad
from tests.captured import Captured
from tests.models import FACTORIES, Case
from tests.zoo.run import adamw, case

SEQ = 39
"""Three ranks have 13 positions each, and two or four do not divide it; nothing else in the small models has this size."""
RING = "cp: seq"
LAYERS = 1
"""Of a decoder here, but for those in pipelines."""


DOCUMENTS = ((5, 9, 25), (39,), (1, 20, 18), (13, 13, 13))
"""How long the documents are that share a row."""
LONG_DOCUMENTS = ((200, 100, 300), (17, 383, 200))
"""The same, of which whole blocks of queries see nothing of others."""


def packed(documents: tuple[tuple[int, ...], ...] = DOCUMENTS, layers: int = 1) -> Case:
    """Llama on rows of several documents, which its positions tell apart, where it keeps no cache: each begins with 0."""
    found = FACTORIES["llama"](seq=sum(documents[0]), batch=len(documents), layers=layers)
    found.model.config.use_cache = False  # type: ignore[union-attr, assignment]
    places = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    return replace(found, kwargs={**found.kwargs, "position_ids": places})


@cache
def captured(kind: str, layers: int = LAYERS) -> Captured:
    rows = {"packed": DOCUMENTS, "documents": LONG_DOCUMENTS}.get(kind)
    found = packed(rows, layers) if rows else FACTORIES[kind](seq=SEQ, batch=4, layers=layers) if kind in FACTORIES else case(kind)
    return Captured(found, train=True, double=True)


@cache
def step(kind: str, mesh: str, plan: str, attention: str) -> PlainProgram:
    source = captured(kind)
    source.restore()
    spec = describe(torch.optim.SGD(source.reference.module.parameters(), lr=0.1))
    return source.program(mesh, plan, optimizer=spec, attention=attention)


def kinds(program: PlainProgram) -> set[str]:
    return {use.kind for use in summary.collectives(program) if "cp" in use.axes}


CASES = [
    ("nanogpt", "cp=2", RING),
    broad("llama", "cp=3", RING),
    broad("llama", "cp=4", RING),
    broad("nanogpt", "cp=3", RING),
    broad("llama", "cp=8", RING),
    broad("llama", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("llama", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    broad("gemma3", "cp=3", RING),
    broad("gemma3", "cp=2", RING),
    broad("gemma3", "cp=4", RING),
    broad("gemma3", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("gemma3", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    broad("whisper", "cp=2", RING),
    broad("whisper", "cp=3", RING),
    broad("whisper", "cp=4", RING),
    broad("whisper", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("whisper", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    broad("gpt_oss", "cp=3", RING),
    broad("gpt_oss", "cp=2", RING),
    broad("gpt_oss", "cp=4", RING),
    broad("gpt_oss", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("gpt_oss", "cp=2,tp=2", "cp: seq\ntp: heads"),
    ("packed", "cp=3", RING),
    broad("packed", "cp=2", RING),
    broad("packed", "cp=4", RING),
    broad("packed", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("packed", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    broad("packed", "cp=2,hp=2", "cp: seq\nhp: heads@attention > seq"),
    *(broad("documents", mesh, plan) for mesh, plan in (("cp=2", RING), ("cp=3", RING), ("dp=2,cp=2", "dp: batch\ncp: seq"))),
    broad("t5", "cp=2", RING),
    broad("t5", "cp=3", RING),
    broad("t5", "cp=4", RING),
    broad("t5", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("t5", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    ("llama", "cp=2,hp=2", "cp: seq\nhp: heads@attention > seq"),
    broad("llama", "cp=3,hp=2", "cp: seq\nhp: heads@attention > seq"),
    broad("nanogpt", "cp=2,hp=4", "cp: seq\nhp: heads@attention > seq"),
    *(broad(kind, "cp=2,hp=2", "cp: seq\nhp: heads@attention > seq") for kind in ("gpt_oss", "gemma3", "t5", "whisper")),
    broad("llama", "dp=2,cp=2,hp=2", "dp: batch\ncp: seq\nhp: heads@attention > seq"),
]


@pytest.mark.parametrize("kind, mesh, plan", CASES)
def test_a_training_step_is_the_models_own(kind: str, mesh: str, plan: str) -> None:
    """Loss, every gradient, and parameters after two steps. Eight ranks are twice as many as there are heads. T5 drops weights, and has a
    bias by position with a gradient, which its layers share."""
    source = captured(kind)
    source.verify_training(mesh, plan, adamw, attention="ring")
    assert "ring_shift" in kinds(source.latest)
    assert not [note for note in source.latest.notes if "Options(attention" in note]
    assert "all_gather" not in kinds(source.latest) or kind != "t5"


@pytest.mark.parametrize("kind", [*map(broad, ("llama", "gpt_oss", "gemma3", "t5", "whisper", "packed"))])
def test_pipeline_stages_have_rings_of_their_own(kind: str) -> None:
    source = captured(kind, 2)
    source.verify_training("pp=2,cp=2", RING, adamw, attention="ring", microbatches=2)
    assert "ring_shift" in kinds(source.latest)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    """What the cells of packed rows are about: the model itself gives another loss where positions go on."""
    found = packed()
    apart, together = (found.model(**{**found.kwargs, "position_ids": places}).loss.item() for places in (
        found.kwargs["position_ids"], torch.arange(SEQ).expand(len(DOCUMENTS), -1)
    ))  # fmt: skip
    assert abs(apart - together) > 1e-4


class Attends(nn.Module):
    """Attention alone, with as many heads for keys as for queries: `how` is torch's."""

    def __init__(self, hidden: int = 16, heads: int = 2, **how: Any) -> None:
        super().__init__()
        self.qkv, self.back, self.heads, self.how = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden), heads, how

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **self.how)
        return self.back(mixed.transpose(1, 2).flatten(2))


def trained(
    model: nn.Module, mesh: str, inputs: dict[str, Tensor], attention: str | None = "ring", plan: str | None = RING, **how: Any
) -> meshc.Program:
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    return meshc.compile(
        step, meshc.Mesh(mesh), kwargs=inputs, plan=plan, options=meshc.Options(sequence=meshc.SplitSequence(attention=attention)), **how
    )


def verified(model: nn.Module, mesh: str, inputs: dict[str, Tensor], *choices: str | None, **how: Any) -> meshc.Program:
    """As `trained`, in float64: what is compiled and what it is compared by are of one trace."""
    program = trained(model.double(), mesh, {name: value.double() for name, value in inputs.items()}, *choices, **how)
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10
    return program


def masked(rows: int = 3) -> Tensor:
    """A bias for each example; from two queries all is hidden but the last key."""
    bias = torch.randn(rows, 1, 7, 7).masked_fill(torch.rand(rows, 1, 7, 7) < 0.5, -torch.inf)
    bias[:, :, 2:4] = -torch.inf
    bias[..., -1] = 0.5
    return bias


@pytest.mark.parametrize("mesh", ["cp=3", broad("cp=2"), broad("cp=4")])
@pytest.mark.parametrize("bias", [None, masked(), masked(1)[:, :, :1]])
def test_masks_that_are_given_as_tensors(mesh: str, bias: Tensor | None) -> None:
    """A rank has the rows of its queries; of these each block takes its columns. 7 positions over 4 ranks: the last has one."""
    torch.manual_seed(0)
    program = verified(Attends(), mesh, {"x": torch.randn(3, 7, 16)} | ({} if bias is None else {"bias": bias}))
    assert "ring_shift" in kinds(program.compiled)


class Biased(nn.Module):
    """Attention with a bias that is learned, of any of the shapes that spread to [batch, heads, queries, keys]."""

    def __init__(self, shape: tuple[int, ...], **how: Any) -> None:
        super().__init__()
        self.attention, self.bias = Attends(**how), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.bias)


@pytest.mark.parametrize("mesh", ["cp=3", broad("cp=2"), broad("cp=4")])
@pytest.mark.parametrize("shape", [(1, 2, 7, 7), (1, 1, 7), broad((7, 7)), broad((3, 2, 7, 1))])
def test_a_bias_may_have_a_gradient(mesh: str, shape: tuple[int, ...]) -> None:
    """A block gives the columns of its keys; 7 positions in tiles of 3, of 4 and of 2. No more is sent than without a bias, but a sum over
    the ranks where the bias is the same for all queries."""
    torch.manual_seed(0)
    program = verified(Biased(shape), mesh, {"x": torch.randn(3, 7, 16)})
    assert "ring_shift" in kinds(program.compiled) and "all_gather" not in kinds(program.compiled)


DROPS = [
    ({"is_causal": True}, "cp=3", RING),
    broad({}, "cp=2", RING),
    broad({}, "cp=2,tp=2", "cp: seq\ntp: heads"),
    broad({"is_causal": True}, "dp=3,cp=2", "dp: batch\ncp: seq"),
    broad({"is_causal": True}, "cp=2,hp=2", "cp: seq\nhp: heads@attention > seq"),
]


@pytest.mark.parametrize("how, mesh, plan", DROPS)
def test_what_is_dropped_is_what_one_device_drops(how: dict[str, Any], mesh: str, plan: str) -> None:
    """Each block draws its own part."""
    torch.manual_seed(0)
    program = verified(Attends(dropout_p=0.4, **how), mesh, {"x": torch.randn(3, 7, 16)}, plan=plan)
    assert "ring_shift" in kinds(program.compiled)
    names = "meshc.attention.default", "meshc.attention_backward.default"
    blocks = [node for node in program.compiled.stages["main"].graph.nodes if str(node.target) in names]
    assert len(blocks) == 2 * meshc.Mesh(mesh).size("cp")


@pytest.mark.parametrize("mix", [broad("mean_of_parts"), broad("refuse")])
def test_microbatches_drop_what_the_whole_batch_drops(mix: str) -> None:
    torch.manual_seed(0)
    model = Biased((1, 2, 7, 7), dropout_p=0.4)
    step = meshc.TrainStep(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean(), microbatches=2, batch_mix=mix
    )
    options = meshc.Options(sequence=meshc.SplitSequence(attention="ring"))
    program = meshc.compile(step, meshc.Mesh("cp=2"), kwargs={"x": torch.randn(4, 7, 16)}, plan=RING, options=options)
    assert "ring_shift" in kinds(program.compiled)
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10


class Pixels(nn.Module):
    """Attention over all positions of an image, of which rows are split."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(16, 16), Attends(**how)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.attention(self.first(x).flatten(1, 2), bias).unflatten(1, x.shape[1:3])


@pytest.mark.parametrize("bias, p", [(torch.randn(2, 1, 12, 12), 0.0), broad(None, 0.0), broad(torch.randn(2, 1, 12, 12), 0.3)])
def test_a_sequence_of_several_factors_passes_round_by_the_outer_one(bias: Tensor | None, p: float) -> None:
    """Three rows of four over two ranks: tiles of 8 positions and of 4, where 12 over 2 would be tiles of 6."""
    inputs = {"x": torch.randn(2, 3, 4, 16)} | ({} if bias is None else {"bias": bias})
    program = verified(Pixels(dropout_p=p), "cp=2", inputs, plan="cp: rows", names={"x": ("batch", "rows", "columns", None)})
    assert "ring_shift" in kinds(program.compiled)


@pytest.mark.broad
def test_in_bfloat16_parts_are_rounded_once() -> None:
    program = trained(Attends(is_causal=True).bfloat16(), "cp=3", {"x": torch.randn(2, 13, 16).bfloat16()})
    merged = [node for node in program.compiled.stages["main"].graph.nodes if "attention_merge" in str(node.target)]
    assert len(merged) == 2 and all(records(node)[0].dtype == torch.float32 for node in merged)
    assert meshc.verify(program).ok


# ------------------------------------------------------------------------------------------------------- what is moved and what is held


@pytest.mark.parametrize("ranks", [3, broad(2), broad(4)])
def test_bytes_are_those_of_the_formulas(ranks: int) -> None:
    """With a tile of ceil(S / n) positions: forward (n - 1) times keys and values of a tile, backward the same once more and their
    gradients as often."""
    program = step("nanogpt", f"cp={ranks}", RING, attention="ring")
    layers, rows, heads, head = LAYERS, 4, 4, 8
    tile = rows * heads * -(-SEQ // ranks) * head * 8
    for phase, values in (("forward", 2), ("backward", 4)):
        found = [use for use in summary.collectives(program) if use.phase == phase and use.kind == "ring_shift"]
        assert sum(use.bytes_per_rank * use.times for use in found) == layers * (ranks - 1) * values * tile
    assert "all_gather" not in kinds(program)


@pytest.mark.parametrize("ring", [2, 3])
def test_bytes_of_heads_and_a_ring_together_are_those_of_the_formulas(ring: int) -> None:
    """Heads over two ranks: each hands over all it has of q, k, v and of the output, and passes round keys of half the heads."""
    program = step("nanogpt", f"cp={ring},hp=2", "cp: seq\nhp: heads@attention > seq", attention="ring")
    layers, rows, heads, head = LAYERS, 4, 4, 8
    tile = -(-SEQ // ring)
    position = rows * heads * head * 8
    for phase, times in (("forward", 1), ("backward", 2)):
        found = [use for use in summary.collectives(program) if use.phase == phase]
        moved = {kind: sum(use.bytes_per_rank * use.times for use in found if use.kind == kind) for kind in ("ring_shift", "all_to_all")}
        assert moved["all_to_all"] == layers * 4 * -(-tile // 2) * position
        assert moved["ring_shift"] == times * layers * 2 * (ring - 1) * tile * position // 2


def test_keys_that_heads_share_travel_once_for_all_of_them() -> None:
    """And their gradients, which the model adds up over these heads: 2 of 4 have keys of their own."""
    program = step("llama", "cp=3", RING, attention="ring")
    kv_heads = 2
    tile = 4 * kv_heads * 13 * 8 * 8
    for use in summary.collectives(program):
        assert use.kind != "ring_shift" or use.bytes_per_rank == tile, use


@pytest.mark.broad
def test_gradients_that_are_read_head_by_head_travel_so() -> None:
    """Keys of two heads for four, of which the model looks at the repeated ones too: no sum stands for these."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
            k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
            k = k.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(q.shape) * 2
            v = v.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(q.shape)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    program = trained(Looks(), "cp=3", {"x": torch.randn(2, 7, 16)})
    uses = [use for use in summary.collectives(program.compiled) if use.kind == "ring_shift"]
    sizes = {(use.phase, use.bytes_per_rank // (2 * 3 * 4 * 4)) for use in uses}
    assert sizes == {("forward", 4), ("forward", 2), ("backward", 4), ("backward", 2)}
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10


@pytest.mark.broad
def test_under_a_window_blocks_go_no_farther_than_it_reaches() -> None:
    """Windows of 4 and tiles of 4 positions: a rank reads three keys of the one before it, whose gradients come home in one shift."""
    program = step("gemma3", "cp=3", RING, attention="ring")
    uses = [use for use in summary.collectives(program) if use.kind == "ring_shift"]
    layers = 2
    assert sum(use.times for use in uses if use.phase == "forward") == layers * 1 * 2
    assert sum(use.times for use in uses if use.phase == "backward") == layers * 1 * 4


def test_no_value_is_as_long_as_the_sequence() -> None:
    """But for what is not computed with: positions, labels, tables of them. Gathered keys are."""

    def long(attention: str) -> set[str]:
        graph = step("nanogpt", "cp=3", RING, attention=attention).stages["main"].graph
        made = (one for node in graph.nodes if node.op == "call_function" for one in records(node))
        return {str(one.shape) for one in made if len(one.shape) == 4 and one.dtype == torch.float64 and SEQ in one.shape}

    assert long("ring") == set()
    assert "(4, 4, 39, 8)" in long("gather")


def test_the_next_block_is_on_its_way_while_one_is_computed() -> None:
    graph = step("llama", "cp=3", RING, attention="ring").stages["main"].graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    names = ("meshc.attention_zigzag.default", "meshc.attention_zigzag_backward.default")  # 39 positions on three ranks: no padding
    blocks = [order[node] for node in graph.nodes if str(node.target) in names]
    shifts = [node for node in graph.nodes if node.target is spmd.ring_shift]
    beside = [any(order[node] < block < min(order[user] for user in node.users) for block in blocks) for node in shifts]
    coming_home = 2 * LAYERS
    """Of each layer, gradients of keys and values behind the last block: nothing is left to compute beside them but what follows."""
    assert beside.count(False) == coming_home


def test_how_far_a_window_reaches() -> None:
    """Tiles of 4: a window of 4 or 5 reaches into the next, one of 6 into the one behind it; no farther than all the way round."""
    assert [ring_steps(32, 32, 4, 8, True, window, 0) for window in (1, 2, 4, 5, 6, 29, 30, 99, 0)] == [0, 1, 1, 1, 2, 7, 7, 7, 7]
    assert ring_steps(32, 32, 4, 8, False, 0, 0) == ring_steps(30, 32, 4, 8, True, 4, 2) == 7, "no window; keys before the first query"
    tile = symbol(Dynamic("seq", 2, 64, 32))
    assert ring_steps(tile, tile, tile // 8, 8, True, 4, 0) == 7, "of another length tiles are shorter"


class Near(nn.Module):
    """Attention to the last four positions, by a mask that is made of positions; or to all before."""

    def __init__(self, near: bool) -> None:
        super().__init__()
        self.near, self.attention = near, Attends(is_causal=not near)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        seen = (at <= at[:, None]) & (at > at[:, None] - 4)
        return self.attention(x, torch.where(seen, 0.0, -torch.inf).to(x.dtype) if self.near else None)


@pytest.mark.parametrize("near", [True, broad(False)])
def test_one_program_passes_keys_round_for_sequences_of_all_lengths(near: bool) -> None:
    """Of 5 positions a rank has 2, and the last of three one."""
    options = meshc.Options(sequence=meshc.SplitSequence(attention="ring"), dynamic={"x": {1: Dim("seq", max=64)}})
    model = Near(near).double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    program = meshc.compile(step, meshc.Mesh("cp=3"), kwargs={"x": torch.randn(2, 12, 16).double()}, plan=RING, options=options)
    assert "ring_shift" in kinds(program.compiled)
    for length in (12, 13, 5):
        assert meshc.verify(program, {"x": torch.randn(2, length, 16).double()}, dtype=torch.float64).worst < 1e-10


# ---------------------------------------------------------------------------------------------------------------------------- choice


class Long(nn.Module):
    """Attention over a sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attends(256, 4, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


@pytest.mark.parametrize("length, kind", [(64, "all_gather"), (32768, "ring_shift")])
def test_short_sequences_are_gathered_and_long_ones_pass_round(length: int, kind: str) -> None:
    with assume_device(device("h100")):
        program = trained(Long(), "cp=4", {"x": torch.empty(1, length, 256)}, None)
    assert kinds(program.compiled) & {"all_gather", "ring_shift"} == {kind}


@pytest.mark.broad
def test_keys_pass_round_where_gathered_ones_would_not_fit() -> None:
    """Though it is slower: eight ranks with 64 positions each, of which h100s wait for messages alone."""
    x = {"x": torch.randn(1, 512, 16)}
    with assume_device(device("h100")):
        programs = [trained(Attends(is_causal=True), "cp=8", x, attention) for attention in (None, "ring")]
        gathered, ring = (peak_memory.peak_rank(program.compiled).total for program in programs)
        assert kinds(programs[0].compiled) >= {"all_gather"} and ring < 0.8 * gathered
        model, budget = Attends(is_causal=True), meshc.Options(memory_budget=(ring + gathered) // 2)
        step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
        program = meshc.compile(step, meshc.Mesh("cp=8"), kwargs=x, plan=RING, options=budget)
    assert "ring_shift" in kinds(program.compiled)
    assert any("keys pass round where gathering them would be faster" in note for note in program.compiled.notes)


def test_what_is_asked_for_is_done() -> None:
    x = {"x": torch.randn(1, 8, 16)}
    for attention, kind in (("ring", "ring_shift"), ("gather", "all_gather")):
        program = trained(Attends(is_causal=True), "cp=2", x, attention)
        assert kinds(program.compiled) & {"all_gather", "ring_shift"} == {kind}
    with pytest.raises(PlanError, match=r"SplitSequence\(attention='rings'\)\): use 'ring', 'zigzag' or 'gather', or None"):
        meshc.Options(sequence=meshc.SplitSequence(attention="rings"))


class Differs(nn.Module):
    """Attention whose values have half as many numbers as its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(16, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (*self.qk(x).chunk(2, -1), self.v(x)))
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_that_cannot_pass_round_says_why() -> None:
    x = {"x": torch.randn(1, 8, 16)}
    for attention in ("ring", "zigzag"):
        with pytest.raises(PlanError, match=rf"\(attention='{attention}'\)\): the keys of attention cannot pass round") as refused:
            trained(Differs(), "cp=2", x, attention)
        assert "it is written out in several operators" in str(refused.value) and "test_rings.py" in str(refused.value)
        assert "what to do: split its heads and not its positions, by a line such as `cp: heads@attention > seq`" in str(refused.value)
    with pytest.raises(PlanError, match=r"its queries are split by several axes \(cp, tp\), and a ring is along one"):
        trained(Attends(), "cp=2,tp=2", x, plan="cp: seq\ntp: seq")


def test_unasked_it_is_gathered() -> None:
    x = {"x": torch.randn(1, 8, 16)}
    assert "ring_shift" not in kinds(verified(Attends(), "cp=2,tp=2", x, None, "cp: seq\ntp: seq").compiled)


def test_keys_that_every_rank_has_are_not_sent_round() -> None:
    """Of a cross attention to what is not split."""

    class Crosses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (self.q(x), *self.kv(memory).chunk(2, -1)))
            return F.scaled_dot_product_attention(q, k, v)

    inputs = {"x": torch.randn(2, 8, 16), "memory": torch.randn(2, 5, 16)}
    program = verified(Crosses(), "cp=2", inputs, names={"memory": ("batch", "remembered", "features")})
    assert kinds(program.compiled) <= {"all_reduce"} and not [note for note in program.compiled.notes if "attention" in note]


SAVED = [
    lambda: Attends(is_causal=True),
    lambda: Biased((1, 2, 7, 7), dropout_p=0.4),
    broad(lambda: Biased((1, 1, 1, 1))),
    broad(lambda: Attends(is_causal=True, dropout_p=0.4)),
]


@pytest.mark.parametrize("model", SAVED)
def test_a_saved_program_is_read_and_checked(model: Any, tmp_path: Any) -> None:
    program = trained(model(), "cp=2", {"x": torch.randn(1, 7, 16)})
    program.save(tmp_path / "ring.meshc")
    read = artifact.load(tmp_path / "ring.meshc")
    assert "ring_shift" in kinds(read)
