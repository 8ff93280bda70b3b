"""`as_strided` in the words of slices, windows and diagonals: equal to torch's, and by which operators."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import meshc
from meshc.ops.as_strided import as_strided

SQUARE, LONG = torch.arange(144.0).reshape(4, 6, 6), torch.arange(384.0).reshape(4, 12, 8)


@pytest.mark.parametrize(
    "x, size, stride, offset",
    [
        pytest.param(SQUARE, (4, 6), (36, 7), None, id="diagonal"),
        pytest.param(SQUARE, (4, 4), (36, 7), 2, id="diagonal that begins later"),
        pytest.param(LONG, (4, 5, 4, 8), (96, 16, 8, 1), None, id="windows that overlap"),
        pytest.param(LONG.view(4, 3, 4, 8), (4, 5, 4, 8), (96, 16, 8, 1), None, id="windows over two dims that lie in one"),
        pytest.param(LONG, (4, 3, 2, 8), (96, 24, 16, 1), None, id="windows with gaps"),
        pytest.param(LONG, (4, 3, 4), (96, 16, 2), 9, id="every other element of every other row"),
        pytest.param(LONG, (8, 4, 3, 12), (1, 96, 0, 8), None, id="another order, and copies"),
        pytest.param(LONG.transpose(0, 2), (8, 4), (1, 104), None, id="of a value that lies otherwise"),
        pytest.param(LONG[1:], (3, 8), (96, 1), 104, id="of a part, counted from the whole's begin"),
        pytest.param(torch.tensor(3.0), (2, 3), (0, 0), None, id="one element"),
    ],
)
def test_it_is_slices_windows_and_diagonals(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> None:
    assert torch.equal(as_strided(x, size, stride, offset), torch.as_strided(x, size, stride, offset))
    graph = make_fx(lambda: as_strided(x, size, stride, offset))().graph
    assert not [node for node in graph.nodes if "as_strided" in str(node.target)]


@pytest.mark.parametrize(
    "size, stride, offset",
    [
        pytest.param((6, 3), (5, 1), None, id="windows that go on in the next row"),
        pytest.param((3, 3, 3), (8, 2, 1), 96, id="three steps along one dim"),
    ],
)
def test_what_is_nothing_of_the_kind_stays_torchs(size: Sequence[int], stride: Sequence[int], offset: int | None) -> None:
    x = torch.arange(384.0).reshape(12, 32)[:, :24]
    assert torch.equal(as_strided(x, size, stride, offset), torch.as_strided(x, size, stride, offset))
    graph = make_fx(lambda: as_strided(x, size, stride, offset))().graph
    assert [node for node in graph.nodes if "as_strided" in str(node.target)]


def test_of_part_of_a_value_what_lies_outside_stays_torchs() -> None:
    part = LONG[2:]
    assert torch.equal(as_strided(part, (3, 8), (96, 1), 0), LONG[:3, 0])


class Diagonals(torch.nn.Module):
    """Written in place through it, and read by it."""

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.score(x) * 1.0
        scores.as_strided((x.shape[0], 6), (36, 7)).mul_(2.0)
        chunks = torch.as_strided(scores, (x.shape[0], 2, 4, 6), (36, 12, 6, 1))
        return (scores.as_strided((x.shape[0], 6), (36, 7)).sin().sum() + chunks.square().sum()) / x.numel()


def test_a_step_with_it_equals_one_device_and_runs_nothing_whole() -> None:
    torch.manual_seed(0)
    model, x = Diagonals(), torch.randn(4, 6, 6)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda loss: loss)
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=(x,))
    meshc.verify(program, (x,), dtype=torch.float64)
    assert "aten.as_strided" not in str(program)
