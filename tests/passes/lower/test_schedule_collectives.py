"""Collectives: they start where their operands are ready, gathers a window ahead, and what starts together travels together."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc.passes.lower import prefetch_windows
from meshc.report import summary
from tests import models
from tests.broad import broad
from tests.passes.stepped import around, body, changed


class Chain(nn.Module):
    """A chain of scales, each stored split under fsdp."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = (x * scale).exp()
        return x


def scheduled(model: nn.Module, mesh: str, plan: str | None = None) -> tuple[str, str]:
    with torch.no_grad():
        return around("collectives", model, mesh, plan, x=torch.zeros(4, 4))


def test_gathers_of_a_window_are_one_message() -> None:
    before, after = scheduled(Chain(3), "dp_shard=2")
    assert_expected_inline(
        body(before, "main"),
        """\
coordinate: "int" = coordinate("dp_shard")
shard: "f32[batch 4/dp_shard, scales.0.0 4] pad(zero: 0.0)" = shard(x, 0, 2, coordinate)
all_gather: "f32[scales.0.0 4]" = all_gather(scales_0, ["dp_shard"], 0)
mul_tensor: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.mul.Tensor(shard, all_gather)
exp_default: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.exp(mul_tensor)
all_gather_1: "f32[scales.0.0 4]" = all_gather(scales_1, ["dp_shard"], 0)
mul_tensor_1: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.mul.Tensor(exp_default, all_gather_1)
exp_default_1: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.exp(mul_tensor_1)
all_gather_2: "f32[scales.0.0 4]" = all_gather(scales_2, ["dp_shard"], 0)
mul_tensor_2: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.mul.Tensor(exp_default_1, all_gather_2)
exp_default_2: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.exp(mul_tensor_2)
all_gather_3: "f32[batch 4, scales.0.0 4]" = all_gather(exp_default_2, ["dp_shard"], 0)
return {
    "output:output": all_gather_3,
}
""",
    )
    assert_expected_inline(
        body(after, "main"),
        """\
coordinate: "int" = coordinate("dp_shard")
shard: "f32[batch 4/dp_shard, scales.0.0 4] pad(zero: 0.0)" = shard(x, 0, 2, coordinate)
reshape_default: "f32[2]" = aten.reshape(scales_0, [-1])
reshape_default_1: "f32[2]" = aten.reshape(scales_1, [-1])
reshape_default_2: "f32[2]" = aten.reshape(scales_2, [-1])
cat_default: "f32[6]" = aten.cat([reshape_default, reshape_default_1, reshape_default_2])
all_gather_4: "f32[12]" = all_gather(cat_default, ["dp_shard"], 0)
reshape_default_3: "f32[2, 6]" = aten.reshape(all_gather_4, [2, 6])
slice_tensor: "f32[2, 2]" = aten.slice.Tensor(reshape_default_3, 1, 0, 2)
reshape_default_4: "f32[scales.0.0 4]" = aten.reshape(slice_tensor, [4])
slice_tensor_1: "f32[2, 2]" = aten.slice.Tensor(reshape_default_3, 1, 2, 4)
reshape_default_5: "f32[scales.0.0 4]" = aten.reshape(slice_tensor_1, [4])
slice_tensor_2: "f32[2, 2]" = aten.slice.Tensor(reshape_default_3, 1, 4, 6)
reshape_default_6: "f32[scales.0.0 4]" = aten.reshape(slice_tensor_2, [4])
mul_tensor: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.mul.Tensor(shard, reshape_default_4)
exp_default: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.exp(mul_tensor)
mul_tensor_1: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.mul.Tensor(exp_default, reshape_default_5)
exp_default_1: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.exp(mul_tensor_1)
mul_tensor_2: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.mul.Tensor(exp_default_1, reshape_default_6)
exp_default_2: "f32[batch 4/dp_shard, scales.0.0 4]" = aten.exp(mul_tensor_2)
all_gather_3: "f32[batch 4, scales.0.0 4]" = all_gather(exp_default_2, ["dp_shard"], 0)
return {
    "output:output": all_gather_3,
}
""",
    )


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a third of what a stage gathers, however little that is."""
    monkeypatch.setattr(prefetch_windows, "LEAST", 0)
    monkeypatch.setattr(prefetch_windows, "WINDOWS", 3)


def untyped(text: str, *words: str) -> str:
    """The lines of a stage that have one of these words, without types."""
    lines = (re.sub(r': "[^"]*"', "", line) for line in body(text, "main").splitlines())
    return "".join(f"{line}\n" for line in lines if any(word in line for word in words))


@pytest.mark.usefixtures("small_windows")
def test_a_window_starts_where_the_one_before_is_first_read() -> None:
    """Three windows of two: the second is on its way when the first is read, and is cut where it is read itself."""
    _, after = scheduled(Chain(6), "dp_shard=2")
    assert_expected_inline(
        untyped(after, "gather", "mul", "[2, 4]"),
        """\
all_gather_7 = all_gather(cat_default, ["dp_shard"], 0)
reshape_default_2 = aten.reshape(all_gather_7, [2, 4])
all_gather_8 = all_gather(cat_default_1, ["dp_shard"], 0)
mul_tensor = aten.mul.Tensor(shard, reshape_default_3)
exp_default = aten.exp(mul_tensor)
mul_tensor_1 = aten.mul.Tensor(exp_default, reshape_default_4)
exp_default_1 = aten.exp(mul_tensor_1)
reshape_default_7 = aten.reshape(all_gather_8, [2, 4])
all_gather_9 = all_gather(cat_default_2, ["dp_shard"], 0)
mul_tensor_2 = aten.mul.Tensor(exp_default_1, reshape_default_8)
exp_default_2 = aten.exp(mul_tensor_2)
mul_tensor_3 = aten.mul.Tensor(exp_default_2, reshape_default_9)
exp_default_3 = aten.exp(mul_tensor_3)
reshape_default_12 = aten.reshape(all_gather_9, [2, 4])
mul_tensor_4 = aten.mul.Tensor(exp_default_3, reshape_default_13)
exp_default_4 = aten.exp(mul_tensor_4)
mul_tensor_5 = aten.mul.Tensor(exp_default_4, reshape_default_14)
exp_default_5 = aten.exp(mul_tensor_5)
all_gather_6 = all_gather(exp_default_5, ["dp_shard"], 0)
    "output:output": all_gather_6,
""",
    )


@pytest.mark.usefixtures("small_windows")
def test_backward_gathers_once_forward_has_read_its_last() -> None:
    """The reduction of a window starts where the last of its gradients is made."""
    model = Chain(4)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.sum())
    _, after = around("collectives", step, "dp_shard=2", x=torch.zeros(4, 4))
    assert_expected_inline(
        untyped(after, "gather", "scatter", "mul", "[2, 4]"),
        """\
all_gather_7 = all_gather(cat_default_1, ["dp_shard"], 0)
reshape_default_11 = aten.reshape(all_gather_7, [2, 4])
all_gather_8 = all_gather(cat_default_2, ["dp_shard"], 0)
mul_tensor = aten.mul.Tensor(shard, reshape_default_12)
exp_default = aten.exp(mul_tensor)
mul_tensor_1 = aten.mul.Tensor(exp_default, reshape_default_13)
exp_default_1 = aten.exp(mul_tensor_1)
reshape_default_16 = aten.reshape(all_gather_8, [2, 4])
mul_tensor_2 = aten.mul.Tensor(exp_default_1, reshape_default_17)
exp_default_2 = aten.exp(mul_tensor_2)
mul_tensor_3 = aten.mul.Tensor(exp_default_2, reshape_default_18)
all_gather_9 = all_gather(cat_default_3, ["dp_shard"], 0)
exp_default_3 = aten.exp(mul_tensor_3)
expand_default = aten.expand(full_default, [2, 4])
mul_tensor_4 = aten.mul.Tensor(expand_default, exp_default_3)
mul_tensor_5 = aten.mul.Tensor(mul_tensor_4, exp_default_2)
reshape_default_21 = aten.reshape(all_gather_9, [2, 4])
all_gather_6 = all_gather(scales_1, ["dp_shard"], 0)
mul_tensor_6 = aten.mul.Tensor(mul_tensor_4, reshape_default_22)
sum_dim_int_list = aten.sum.dim_IntList(mul_tensor_5, [0], True)
reduce_scatter_3 = reduce_scatter(sum_dim_int_list, ["dp_shard"], 1, "sum")
mul_tensor_7 = aten.mul.Tensor(mul_tensor_6, exp_default_2)
mul_tensor_8 = aten.mul.Tensor(mul_tensor_7, exp_default_1)
mul_tensor_9 = aten.mul.Tensor(mul_tensor_7, reshape_default_23)
sum_dim_int_list_1 = aten.sum.dim_IntList(mul_tensor_8, [0], True)
reduce_scatter_2 = reduce_scatter(sum_dim_int_list_1, ["dp_shard"], 1, "sum")
mul_tensor_10 = aten.mul.Tensor(mul_tensor_9, exp_default_1)
mul_tensor_11 = aten.mul.Tensor(mul_tensor_10, exp_default)
mul_tensor_12 = aten.mul.Tensor(mul_tensor_10, all_gather_6)
sum_dim_int_list_2 = aten.sum.dim_IntList(mul_tensor_11, [0], True)
reduce_scatter_1 = reduce_scatter(sum_dim_int_list_2, ["dp_shard"], 1, "sum")
mul_tensor_13 = aten.mul.Tensor(mul_tensor_12, exp_default)
mul_tensor_14 = aten.mul.Tensor(mul_tensor_13, shard)
sum_dim_int_list_3 = aten.sum.dim_IntList(mul_tensor_14, [0], True)
reduce_scatter = reduce_scatter(sum_dim_int_list_3, ["dp_shard"], 1, "sum")
reshape_default = aten.reshape(reduce_scatter, [2])
reshape_default_1 = aten.reshape(reduce_scatter_1, [2])
reshape_default_2 = aten.reshape(reduce_scatter_2, [2])
reshape_default_3 = aten.reshape(reduce_scatter_3, [2])
""",
    )


def test_gradients_are_reduced_as_soon_as_they_are_made() -> None:
    model = Chain(2)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.sum())
    before, after = around("collectives", step, "dp=2", x=torch.zeros(4, 4))
    assert before.count("all_reduce(") == 3
    assert_expected_inline(
        "".join(f"{line}\n" for line in body(after, "main").splitlines() if "reduce" in line or "sgd" in line),
        """\
all_reduce_3: "f32[9]" = all_reduce(cat_default, ["dp"], "sum")
reshape_default_5: "f32[1, 9]" = aten.reshape(all_reduce_3, [1, 9])
sgd_plain_default: "f32[scales.0.0 4]" = meshc.sgd_plain(scales_0, reshape_default, number_0_lr, number_0_weight_decay, False)
sgd_plain_default_1: "f32[scales.0.0 4]" = meshc.sgd_plain(scales_1, reshape_default_1, number_0_lr, number_0_weight_decay, False)
    "parameter:scales.0": sgd_plain_default,
    "parameter:scales.1": sgd_plain_default_1,
""",
    )


def test_without_collectives_nothing_changes() -> None:
    assert changed(*scheduled(Chain(2), "dp=2", "dp: batch")) == ""


def gpt(batch: int) -> models.Case:
    return models.nanogpt(batch=batch, seq=8, hidden=16, layers=2, heads=4, vocab=13)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("mesh, plan, backend, microbatches, gathers", [
    broad("dp_shard=3", "fsdp", "eager", 1, 4),
    broad("dp_shard=2", "fsdp", "inductor", 2, 8),
    broad("dp=3", "zero2", "eager", 1, 28),
    broad("dp_replicate=2,dp_shard=2", "hsdp", "eager", 1, 4),
    ("pp=2,dp_shard=2", None, "eager", 2, 8),
    broad("dp_shard=2,tp=2", None, "eager", 1, 4),
])  # fmt: skip
def test_windows_mean_what_single_gathers_meant(mesh: str, plan: str, backend: str, microbatches: int, gathers: int) -> None:
    """Uneven tiles, microbatches, reductions over two axes after each other, stages that gather before their first microbatch."""
    case = gpt(batch=6 if "3" in mesh else 4)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, backend=backend)
    assert meshc.verify(program).ok
    found = Counter[str]()
    for use in summary.collectives(program.compiled):
        found[use.kind] += use.times
    assert found["all_gather"] == gathers
