"""Operators in place and views: on intermediates they mean what they say; on inputs they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from tests.broad import broad
from tests.meaning.checks import MESHES, calls_alike, module_means_itself, step_means_itself

X = {"x": torch.randn(7, 6, generator=torch.Generator().manual_seed(1))}


class InPlace(nn.Module):
    """Writes through views of views, by rows, columns and masks, into new tensors and into results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.add_(1).mul_(0.5)
        h[:, :3] *= 2
        h.view(-1, 4, 2)[:, 1].mul_(3.0)
        h = h.clone()
        h[1] = 0.0
        h[x[:, 0] > 0] = 0.25
        y = torch.zeros(7, 8, dtype=x.dtype)
        y[2:5] = h[2:5]
        y.t()[3].add_(h[:, 0])
        y[:, -1].copy_(h[:, 1])
        out = self.b(h).relu_() + y
        out[..., 2].fill_(1.5)
        return out


@pytest.mark.parametrize("mesh", [broad(MESHES[0]), MESHES[1]])
def test_intermediates_are_changed_in_place(mesh: str) -> None:
    torch.manual_seed(0)
    module_means_itself(InPlace(), X, mesh)
    module_means_itself(InPlace(), X, mesh, grad=False)
    step_means_itself(InPlace(), X, mesh)


def test_a_call_changes_nothing_of_its_inputs() -> None:
    torch.manual_seed(0)
    calls_alike(InPlace(), X)


class Views(nn.Module):
    """The same memory seen through every kind of view, and read after it was written through another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x).tanh()
        left, right = h.chunk(2, -1)
        grid = h.unflatten(-1, (2, 2, 2)).movedim(1, -1)
        picked = h.unfold(1, 4, 2).sum(-1)
        wide = h[:, :1].expand(-1, 3) + h.diagonal(0, 0, 1)[0]
        return left * right.flip(-1), grid.flatten(1)[:, ::2], picked, wide, h.narrow(0, 3, 2).squeeze(), h.as_strided((3, 2), (8, 1))


@pytest.mark.parametrize("mesh", [broad(MESHES[0]), MESHES[1]])
def test_views(mesh: str) -> None:
    torch.manual_seed(0)
    module_means_itself(Views(), X, mesh)
    module_means_itself(Views(), X, mesh, grad=False)


class Diagonal(nn.Module):
    """A diagonal that is written, which torch does by strides: of products with itself, and of a tall matrix behind a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x)
        pairs = h @ h.t()
        pairs.fill_diagonal_(0.5)
        return pairs.exp(), h.clone()[:, 1:4].fill_diagonal_(0)


def test_a_diagonal_is_written_by_a_mask() -> None:
    torch.manual_seed(0)
    program = module_means_itself(Diagonal(), X, MESHES[1])
    assert "as_strided" not in str(program)


class Flagged(nn.Module):
    """Initialised by its first batch, as activation norms and codebooks are."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.register_buffer("initted", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.initted else x


def test_a_flag_in_a_buffer_is_refused_with_a_line_that_works() -> None:
    model: Any = Flagged()
    with pytest.raises(meshc.CaptureError, match=r"test_inplace.py:[\s\S]*flag = bool\(module.flag\); del module.flag; module.flag = flag"):
        meshc.compile(model, meshc.Mesh("dp=2"), kwargs=X)
    flag = bool(model.initted)
    del model.initted
    model.initted = flag
    module_means_itself(model, X, MESHES[1])


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_an_input_changed_in_place_is_refused(grad: bool, view: bool) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            (x[:, 1:3] if view else x).mul_(2)
            return self.a(x)

    with torch.set_grad_enabled(grad), pytest.raises(meshc.CaptureError, match=r"changes its input x in place.*\n.*x\.clone\(\)"):
        meshc.compile(Changes(), meshc.Mesh("dp=2"), kwargs=X)
