"""Collectives: they start where their operands are ready, and small ones travel together."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
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


def scheduled(model: nn.Module, mesh: str, plan: str = "auto") -> tuple[str, str]:
    with torch.no_grad():
        return around("collectives", model, mesh, plan, x=torch.zeros(4, 4))


def test_a_gather_starts_where_the_one_before_it_stood() -> None:
    before, after = scheduled(Chain(3), "dp_shard=2")
    assert_expected_inline(body(before, "main"), """\
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
""")
    assert_expected_inline(body(after, "main"), """\
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
""")


def test_gradients_are_reduced_as_soon_as_they_are_made() -> None:
    model = Chain(2)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.sum())
    before, after = around("collectives", step, "dp=2", x=torch.zeros(4, 4))
    assert before.count("all_reduce(") == 3
    assert_expected_inline("".join(f"{line}\n" for line in body(after, "main").splitlines() if "reduce" in line or "sgd" in line), """\
all_reduce_3: "f32[9]" = all_reduce(cat_default, ["dp"], "sum")
reshape_default_5: "f32[1, 9]" = aten.reshape(all_reduce_3, [1, 9])
sgd_plain_default: "f32[scales.0.0 4]" = meshc.sgd_plain(scales_0, reshape_default, number_0_lr, number_0_weight_decay, False)
sgd_plain_default_1: "f32[scales.0.0 4]" = meshc.sgd_plain(scales_1, reshape_default_1, number_0_lr, number_0_weight_decay, False)
    "parameter:scales.0": sgd_plain_default,
    "parameter:scales.1": sgd_plain_default_1,
""")


def test_without_collectives_nothing_changes() -> None:
    assert changed(*scheduled(Chain(2), "dp=2", "dp: batch")) == ""
