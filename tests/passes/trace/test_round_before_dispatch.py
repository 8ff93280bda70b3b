"""Rows are rounded before they are handed to experts: the same operands bit for bit, in a half of the bytes."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import meshc
from meshc import ir
from meshc.cost.links import payload
from meshc.errors import VerifyError
from meshc.ir import spmd
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.passes.trace import round_before_dispatch as rounding
from meshc.passes.trace import set_precision

ours = torch.ops.meshc
TOKENS, HIDDEN, EXPERTS, CHOSEN, RANKS = 8 * 16, 64, 8, 2, 4


def model(dtype: torch.dtype = torch.float32) -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=65, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, eos_token_id=1,
    )  # fmt: skip
    return MixtralForCausalLM(config).to(dtype)


def program(line: str, mesh: str = "ep=4", dtype: torch.dtype = torch.float32, train: bool = True) -> meshc.Program:
    made = model(dtype)
    ids = torch.randint(65, (8, 16), generator=torch.Generator().manual_seed(1))
    if not train:
        with torch.no_grad():
            return meshc.compile(made.eval(), meshc.Mesh(mesh), kwargs={"input_ids": ids}, plan=line)
    step = meshc.TrainStep(made, optimizer=torch.optim.SGD(made.parameters(), lr=0.1))
    return meshc.compile(step, meshc.Mesh(mesh), kwargs={"input_ids": ids, "labels": ids}, plan=line)


def sent(found: meshc.Program, phase: str = "forward") -> dict[Any, int]:
    """Bytes that are handed out, by dtype."""
    compiled: Any = found.compiled
    nodes = [node for stage in compiled.stages.values() for node in stage.graph.nodes if node.target is spmd.gather_rows]
    return {ir.record(node).dtype: payload(node, compiled.axis_sizes) for node in nodes if ir.record(node).phase == phase}


def test_rows_travel_in_a_byte_an_element() -> None:
    """By the formula: half of what bfloat16 takes; a scale for each row goes with the weights of its choices."""
    share = round(1 - comb(EXPERTS - EXPERTS // RANKS, CHOSEN) / comb(EXPERTS, CHOSEN), 4)
    rows = share * (RANKS - 1) / RANKS * TOKENS
    line = "precision model.layers.*.experts: float8 row"
    assert sent(program(line)) == {torch.float8_e4m3fn: int(rows * HIDDEN), torch.float32: int(rows * 4 * (1 + CHOSEN))}
    plain, rounded = sent(program("", dtype=torch.bfloat16)), sent(program(line, dtype=torch.bfloat16))
    assert plain == {torch.bfloat16: int(rows * 2 * HIDDEN)}
    assert rounded[torch.float8_e4m3fn] == int(rows * HIDDEN)
    assert sent(program(line), "backward") == {torch.float32: int(rows * 4 * HIDDEN)}


def test_rows_that_something_reads_unrounded_travel_so() -> None:
    """Gradients of weights as the model has them need the rows themselves; without gradients nothing does."""
    line = "precision model.layers.*.experts: float8 row, gradients in bf16"
    assert set(sent(program(line))) == {torch.float32}
    assert torch.float8_e4m3fn in sent(program(line, train=False))
    assert meshc.verify(program(line, train=False)).worst < 1e-12


def rows_of(x: Tensor, choices: int) -> dict[Any, tuple[Any, ...]]:
    """Operators that hand out rows, each with what it is called with beside them: some places have no token."""
    own = torch.randint(-1, 3, (2, x.shape[0], choices), generator=torch.Generator().manual_seed(3))
    place = torch.randint(-1, x.shape[0] * choices, (2, 1, 24), generator=torch.Generator().manual_seed(4))
    return {ours.to_groups: (own,), ours.to_places: (place, choices)}


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("hand", [ours.to_groups, ours.to_places])
def test_rounding_commutes_with_handing_rows_out(hand: Any, element: str) -> None:
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(2)).bfloat16() * torch.logspace(-30, 6, 20).unsqueeze(1)
    x[3], x[4, 5] = 0.0, float("inf")
    others = rows_of(x, 2)[hand]
    tokens = x if hand is ours.to_groups else x.unsqueeze(0)
    scale = ours.scale_of(tokens, [tokens.dim() - 1], element, "down")
    before = ours.dequantize(hand(ours.quantize(tokens, scale, element), *others), hand(scale, *others), torch.float32)
    rows = hand(tokens, *others)
    scale = ours.scale_of(rows, [rows.dim() - 1], element, "down")
    behind = ours.dequantize(ours.quantize(rows, scale, element), scale, torch.float32)
    assert torch.equal(before.nan_to_num(7.0), behind.nan_to_num(7.0))


@pytest.mark.unproved
def test_a_scale_that_goes_to_other_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever rounds ahead of the dispatch must say whose scale it is."""

    def shifted(graph: torch.fx.Graph) -> None:
        rounding.round_before_dispatch(graph)
        scale = next(node for node in graph.nodes if node.target is ours.to_groups.default and ir.record(node).shape[-1] == 1)
        x = scale.args[0]
        with graph.inserting_before(scale):
            scale.update_arg(0, ir.graph.call(graph, ir.record(x), torch.ops.aten.roll.default, x, [1], [0]))

    monkeypatch.setattr(set_precision, "round_before_dispatch", shifted)
    with pytest.raises(VerifyError, match="does not mean what the model means"):
        meshc.verify(program("precision model.layers.*.experts: float8 row"))
