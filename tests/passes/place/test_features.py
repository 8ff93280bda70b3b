"""What a plan may call what products make: channels between convolutions, features of all, and what `tp` takes of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.cost import divided_work


class Net(nn.Module):
    """Two convolutions with a depthwise one between them, and a projection of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.leave = nn.Conv2d(8, 6, 1)
        self.project = nn.Linear(5, 6)

    def forward(self, images: Tensor, extra: Tensor) -> Tensor:
        return self.leave(self.depth(F.relu(self.enter(images)))).mean((2, 3)) + torch.tanh(self.project(extra))


def compiled(plan: str | None = None) -> meshc.Program:
    with torch.no_grad():
        return meshc.compile(Net(), meshc.Mesh("tp=2"), args=(torch.randn(4, 3, 9, 9), torch.randn(4, 5)), plan=plan)


def split(program: meshc.Program) -> dict[str, str]:
    return {row.module: row.by_axis["tp"] for row in divided_work.work_rows(program.compiled) or []}


def lies(program: meshc.Program, name: str) -> list[list[tuple[str, ...]]]:
    sharding = program.compiled.port(f"parameter:{name}").sharding
    assert sharding is not None
    return [[part.axes for part in dim] for dim in sharding.dims]


def test_what_a_convolution_makes_and_another_sums_is_channels() -> None:
    program = compiled()
    assert lies(program, "enter.weight") == [[("tp",)], [()], [()], [()]]
    assert lies(program, "depth.weight") == [[("tp",)], [], [()], [()]]
    assert lies(program, "leave.weight")[:2] == [[()], [("tp",)]]
    rows = [line.split() for line in program.factors().splitlines()]
    assert ["channels", "features,", "ffn", "8", "1"] in [row[:5] for row in rows], rows


def test_a_product_without_a_named_class_splits_a_feature_dim() -> None:
    assert split(compiled()) == {"enter": "split", "depth": "split", "leave": "split", "project": "split"}
    assert lies(compiled(), "project.weight") == [[("tp",)], [()]]


def test_features_are_taken_only_where_the_plan_says_so() -> None:
    assert split(compiled("tp: ffn")) == {
        "enter": "split", "depth": "split", "leave": "split", "project": "could be split",
    }  # fmt: skip
    assert split(compiled("tp: features@project")) == {
        "enter": "could be split", "depth": "could be split", "leave": "could be split", "project": "split",
    }  # fmt: skip


def test_features_outside_products_are_left_alone() -> None:
    """What the projection makes is a feature dim, but tanh is no product: it works on all of it."""
    (node,) = [node for node in compiled().compiled.stage.graph.nodes if "tanh" in str(node.target)]
    assert node.meta["meshc"].sharding.axes() == set() and node.meta["meshc"].shape == (4, 6)
