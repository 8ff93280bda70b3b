"""Operators in place and views: on intermediates they mean what they say; on inputs they are refused."""

from __future__ import annotations

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
