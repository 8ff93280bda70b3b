"""Grow: programs of models captured in part are those of models captured whole, line by line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc.passes.phases.captured_depth import Stretch
from tests.broad import broad
from tests.passes.depth.stacks import WIDTH, WORDS, Layer, Stack, compiled
from tests.passes.depth.texts import text_of
from tests.passes.stepped import around, changed


class Product(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.mm(self.weight)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Product, range(6)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_two_layers_more() -> None:
    assert_expected_inline(changed(*around("grow", Chain(), "dp=2", x=torch.zeros(2, 4))), """\
- layers_3_weight: "f32[ffn 4, layers.3.weight.1 4]" = "parameter:layers.3.weight",
+ layers_3_weight: "f32[ffn 4, ffn 4]" = "parameter:layers.3.weight",
+ layers_4_weight: "f32[ffn 4, ffn 4]" = "parameter:layers.4.weight",
+ layers_5_weight: "f32[ffn 4, layers.5.weight.1 4]" = "parameter:layers.5.weight",
- mm_default_3: "f32[batch 2/dp, layers.3.weight.1 4]" = aten.mm(mm_default_2, layers_3_weight)
- all_gather: "f32[batch 2, layers.3.weight.1 4]" = all_gather(mm_default_3, ["dp"], 0)
+ mm_default_3: "f32[batch 2/dp, ffn 4]" = aten.mm(mm_default_2, layers_3_weight)
+ mm_default_4: "f32[batch 2/dp, ffn 4]" = aten.mm(mm_default_3, layers_4_weight)
+ mm_default_5: "f32[batch 2/dp, layers.5.weight.1 4]" = aten.mm(mm_default_4, layers_5_weight)
+ all_gather: "f32[batch 2, layers.5.weight.1 4]" = all_gather(mm_default_5, ["dp"], 0)
""")


@pytest.mark.parametrize(
    ("hidden", "asked"),
    [
        broad([16] * 6, {}),
        ([16] * 7, {"mesh": "dp_shard=2,tp=2", "clip_grad_norm": 1.0}),
        broad([16] * 6, {"microbatches": 2}),
        broad([16] * 6, {"mesh": "pp=2", "microbatches": 2}),
        broad([16] * 6, {"train": False, "mesh": "tp=2"}),
        broad([16] * 6, {"mesh": "dp=2,tp=2", "plan": "store *.up.weight state: ffn/dp/tp, _\nstore *.down.weight grads: _, ffn/tp/dp"}),
        broad([8] + [16, 24] * 5, {}),
    ],
)
def test_texts_are_equal(hidden: list[int], asked: dict[str, Any]) -> None:
    whole, grown = (compiled(Stack(hidden, dropout=0.1), depth=depth, **asked) for depth in ("whole", "auto"))
    assert whole.lowered.depth is None and grown.lowered.depth is not None
    assert text_of(grown.compiled) == text_of(whole.compiled)
    assert grown.compiled.info == whole.compiled.info
    assert grown.compiled.notes == whole.compiled.notes


RUNNING = """
    dp: batch
    tp: ffn
    pin op:layers.*.norm.weight/update/add: -/dp, -/tp
    pin op:layers.*.down.*/update/add: -/dp, partial/tp
"""


@pytest.mark.broad
def test_the_running_sum_of_the_norm_may_be_reduced_between_layers() -> None:
    """Each layer leaves it partial, and the next adds to it as a whole."""
    asked: dict[str, Any] = {"mesh": "dp=2,tp=2", "clip_grad_norm": 1.0, "plan": RUNNING}
    whole, grown = (compiled(Stack([16] * 6), depth=depth, **asked) for depth in ("whole", "auto"))
    assert grown.lowered.depth is not None
    text = text_of(grown.compiled)
    assert text == text_of(whole.compiled)
    update = text.partition("# -------- update --------")[2]
    assert len(re.findall(r'"f32\[\] .*all_reduce.*# the gradient norm; tp: ffn', update)) == 6


class Sliced(Layer):
    """Each makes of what it is given the same as all others that are given it."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x, shift[:WIDTH].exp())


class InTurn(Stack):
    """The first two layers make what the others read: each gives one of two things to every second."""

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__(hidden, 0.1, Sliced)

    def shift(self, number: int) -> Tensor:
        return self.shifts[number % 2]


@pytest.mark.parametrize("mesh", ["dp=2", broad("dp_shard=2,tp=2"), broad("pp=2,tp=2")])
def test_what_the_first_of_a_kind_makes_for_all_is_no_layer_s(mesh: str) -> None:
    whole, grown = (compiled(InTurn([16] * 11), mesh, depth) for depth in ("whole", "auto"))
    assert grown.lowered.depth is not None and grown.lowered.depth.stretches == (Stretch("layers", 0, 2, 2, 1, 2),)
    assert text_of(grown.compiled) == text_of(whole.compiled)


class Learned(InTurn):
    """What every second layer is given takes a gradient, which is added up from the last of each kind on."""

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__(hidden)
        self.even, self.odd = (nn.Parameter(shift.clone()) for shift in self.shifts)

    def shift(self, number: int) -> Tensor:
        return self.odd if number % 2 else self.even


@pytest.mark.broad
def test_a_block_at_each_end_is_captured_where_one_layer_is_not_enough() -> None:
    whole, grown = (compiled(Learned([16] * 12), depth=depth) for depth in ("whole", "auto"))
    assert grown.lowered.depth is not None and grown.lowered.depth.stretches == (Stretch("layers", 0, 2, 2, 2, 2),)
    assert text_of(grown.compiled) == text_of(whole.compiled)


@pytest.mark.broad
def test_what_is_not_equal_is_captured_whole_with_a_note() -> None:
    program = compiled(Stack([16, 8, 24, 40, 48, 56]))
    assert program.lowered.depth is None
    assert [note for note in program.compiled.notes if "one by one: layers.1 and layers.2 differ in" in note]
    assert not [note for note in compiled(Stack([16] * 6), depth="whole").compiled.notes if "one by one" in note]


class Added(nn.Module):
    """Layers side by side: the gradient of one is that of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 8) for _ in range(7)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum((layer(x) for layer in self.layers), torch.zeros(())).relu())


def test_layers_whose_gradients_are_one_value_have_them_all() -> None:
    program = meshc.compile(Added().double(), meshc.Mesh("dp=2"), args=(torch.randn(4, 4, dtype=torch.float64),))
    assert [note for note in program.compiled.notes if "one by one: gradient layers.2.weight is made outside of its layer" in note]
    gradients = {name for kind, name, _ in meshc.verify(program).rows if kind == "gradient"}
    assert gradients == {f"{of}.{name}" for of in (*(f"layers.{i}" for i in range(7)), "head") for name in ("weight", "bias")}


def test_a_grown_step_means_what_the_model_means() -> None:
    ids = torch.randint(WORDS, (4, 3))
    program = compiled(Stack([16] * 6, dropout=0.1), mesh="dp=2,tp=2", clip_grad_norm=0.1)
    assert program.lowered.depth is not None
    meshc.verify(program, {"ids": ids, "target": ids})


@pytest.mark.broad
def test_verification_after_each_pass_covers_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_VERIFY", "1")
    torch.manual_seed(0)
    assert compiled(Stack([16] * 6), mesh="tp=2").lowered.depth is not None
