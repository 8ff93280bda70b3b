"""Fold scans: a scan between two flips of its dim is one from the end; another is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc.report import summary
from tests.broad import broad
from tests.formulas.recurrence_traffic import Recurrence, traffic
from tests.passes.stepped import around, changed


class Scanned(nn.Module):
    def __init__(self, scan: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.scan, self.last = nn.Linear(8, 8), scan, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scan(self.first(x)))


def folded(function: Callable[[Tensor], Tensor]) -> str:
    with torch.no_grad():
        return changed(*around("fold_scans", Scanned(function), "dp=2", x=torch.zeros(2, 6, 8)))


def test_a_sum_from_the_end() -> None:
    assert_expected_inline(folded(lambda x: x.flip(1).cumsum(1).flip(-2)), """\
- flip: "f32[2, 6, 8]" = aten.flip(view_1, [1])
- cumsum: "f32[2, 6, 8]" = aten.cumsum(flip, 1)
- flip_1: "f32[2, 6, 8]" = aten.flip(cumsum, [-2])
- view_2: "f32[12, 8]" = aten.reshape(flip_1, [12, 8])
+ cumsum_back: "f32[2, 6, 8]" = meshc.cumsum_back(view_1, 1)
+ view_2: "f32[12, 8]" = aten.reshape(cumsum_back, [12, 8])
""")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(1).cumsum(2).flip(1),  # along another dim
        broad(lambda x: x.flip(1, 2).cumsum(1).flip(1, 2)),  # other dims are flipped too
        broad(lambda x: x.flip(1).cumsum(1)),
        broad(lambda x: x.flip(1).cumprod(1).flip(1)),
    ],
)
def test_others_stay(function: Callable[[Tensor], Tensor]) -> None:
    assert folded(function) == ""


SCANS = {
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: (0.1 * x + 1).cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cummax": lambda x: x.cummax(1)[0],
}


SENT = {
    "cumsum": {"running sum": (1, 1)},
    "logcumsumexp": {"running log-sum": (1, 2)},  # of what is positive and of what is negative in the gradient
    "cumprod": {"running product": (1, 1), "running sum": (0, 3)},  # as torch writes the gradient of a product with zeros
    "cummax": {"running maximum": (3, 0)},  # where it stands is an i64; a gradient goes there
}
"""How many positions of float32 a rank is given of each rank for each scan, forward and backward."""


@pytest.mark.parametrize("name", ["cumsum", broad("logcumsumexp"), broad("cumprod"), broad("cummax")])
def test_no_scan_gathers_a_split_dim(name: str) -> None:
    """Forward and backward: the largest thing that is gathered is a position of each rank, with its place if that is asked for."""
    model = Scanned(SCANS[name])
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss)
    given = {"x": torch.randn(2, 14, 8), "target": torch.randn(2, 14, 8)}
    program = meshc.compile(step, meshc.Mesh("cp=3"), kwargs=given, plan="cp: seq")
    assert meshc.verify(program, given, dtype=torch.float64).ok
    gathers = [use.bytes_per_rank for use in summary.collectives(program.compiled) if use.kind == "all_gather"]
    position = 2 * 8 * 4 * 3
    assert gathers and max(gathers) <= 2 * position
    both = {kind: (one * position, other * position) for kind, (one, other) in SENT[name].items()}
    assert traffic(program.compiled) == [Recurrence("", kind, ("cp",), 3, 0, bytes, bytes) for kind, bytes in both.items()]
