"""Emit: the updates of all parameters of a group in one, in place."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from tests.passes.stepped import around, changed


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).mean()


def emitted(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    return changed(*around("fuse_updates", meshc.TrainStep(model, optimizer=optimizer), "dp=2", x=torch.zeros(4, 4)))


def test_one_update_writes_all_parameters() -> None:
    model = Affine()
    assert_expected_inline(emitted(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model), """\
- sgd_default: "(f32[4], f32[4], f32[])" = meshc.sgd(scale, reshape_default, scale_momentum_buffer, scale_meshc_first, number_0_lr, number_0_momentum, number_0_dampening, number_0_weight_decay, False, False)
- getitem: "f32[scale.0 4]" = getitem(sgd_default, 0)
- getitem_1: "f32[scale.0 4]" = getitem(sgd_default, 1)
- getitem_2: "f32[] whole" = getitem(sgd_default, 2)
- sgd_default_1: "(f32[4], f32[4], f32[])" = meshc.sgd(shift, reshape_default_1, shift_momentum_buffer, shift_meshc_first, number_0_lr, number_0_momentum, number_0_dampening, number_0_weight_decay, False, False)
- getitem_3: "f32[scale.0 4]" = getitem(sgd_default_1, 0)
- getitem_4: "f32[scale.0 4]" = getitem(sgd_default_1, 1)
- getitem_5: "f32[] whole" = getitem(sgd_default_1, 2)
+ sgd_many__default: "int" = meshc.sgd_many_([scale, shift], [reshape_default, reshape_default_1], [scale_momentum_buffer, shift_momentum_buffer], [scale_meshc_first, shift_meshc_first], number_0_lr, number_0_momentum, number_0_dampening, number_0_weight_decay, False, False)
- "parameter:scale": getitem,
- "state:scale/momentum_buffer": getitem_1,
- "state:scale/meshc.first": getitem_2,
- "parameter:shift": getitem_3,
- "state:shift/momentum_buffer": getitem_4,
- "state:shift/meshc.first": getitem_5,
+ "parameter:scale": scale,
+ "state:scale/momentum_buffer": scale_momentum_buffer,
+ "state:scale/meshc.first": scale_meshc_first,
+ "parameter:shift": shift,
+ "state:shift/momentum_buffer": shift_momentum_buffer,
+ "state:shift/meshc.first": shift_meshc_first,
""")


def test_groups_are_updated_apart() -> None:
    model = Affine()
    groups = [{"params": [model.scale]}, {"params": [model.shift], "lr": 0.2}]
    lines = emitted(torch.optim.SGD(groups, lr=0.1), model).splitlines()
    assert sum("+ " in line and "sgd_plain_many_(" in line for line in lines) == 2


def test_a_program_without_updates_is_left_alone() -> None:
    assert changed(*around("fuse_updates", Affine(), "dp=2", x=torch.zeros(4, 4))) == ""


class Chosen(nn.Module):
    """A gradient that is itself chosen: of a part of the numbers a constant, of others what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.smooth_l1_loss(x, self.weight)


def test_a_parameter_whose_gradient_is_chosen_is_written_like_others() -> None:
    model = Chosen()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    text = str(meshc.compile(step, meshc.Mesh("a=2"), kwargs={"x": torch.zeros(6)}, plan="a: -"))
    assert "aten.where.self(" in text and text.count("meshc.sgd_many_(") == 1 and "meshc.sgd(" not in text
