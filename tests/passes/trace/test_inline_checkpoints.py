"""Inline: checkpointed regions become part of the graph, nested ones too."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.passes.stepped import around, body, changed


class Regions(nn.Module):
    """`depth` regions, each inside the one before."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.weight, self.depth = nn.Parameter(torch.ones(3, 3)), depth

    def forward(self, x: Tensor) -> Tensor:
        return self._region(x, self.depth)

    def _region(self, x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            return F.gelu(x @ self.weight)
        return checkpoint(self._region, x, depth - 1, use_reentrant=False)


def test_the_body_takes_the_place_of_its_call() -> None:
    before, after = around("inline", Regions(1), "dp=2", x=torch.zeros(4, 3))
    assert_expected_inline(changed(before, after), """\
- wrap_body_0 = self.wrap_body_0
- tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(wrap_body_0, l_flat_args_0_, l__self____export_root_module_weight, use_reentrant=False)
- res: "f32[4, 3]" = operator.getitem(tag_activation_checkpoint, 0)
- return (res,)
+ matmul: "f32[4, 3]" = operator.matmul(l_flat_args_0_, l__self____export_root_module_weight)
+ gelu: "f32[4, 3]" = torch.nn.functional.gelu(matmul)
+ return (gelu,)
""")


def test_a_region_within_a_region() -> None:
    _, after = around("inline", Regions(2), "dp=2", x=torch.zeros(4, 3))
    assert_expected_inline(body(after), """\
l__self____export_root_module_weight: "f32[3, 3]" = self.L__self___module_weight
matmul: "f32[4, 3]" = operator.matmul(l_flat_args_0_, l__self____export_root_module_weight)
gelu: "f32[4, 3]" = torch.nn.functional.gelu(matmul)
return (gelu,)
""")


def test_without_regions_nothing_changes() -> None:
    before, after = around("inline", Regions(0), "dp=2", x=torch.zeros(4, 3))
    assert changed(before, after) == ""
