"""Factorisations that torch checks: the same results and gradients, and NaN, not what LAPACK leaves, where torch raises an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshc
from tests.broad import broad
from tests.meaning.checks import MESHES, one_rank, step_means_itself

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": torch.linalg.inv,
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "solve": lambda a: torch.linalg.solve(a, a.square()[..., 0]),
    "solve_matrix": lambda a: torch.linalg.solve(a, a.square()[..., :2]),
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
}
X = {"x": torch.randn(7, 5, 5, generator=torch.Generator().manual_seed(1))}


class Factored(nn.Module):
    def __init__(self, call: str, shift: float) -> None:
        super().__init__()
        self.call, self.shift = call, shift
        self.up = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return CALLS[self.call](self.up(x) + self.shift * torch.eye(5))


@pytest.mark.parametrize("mesh", [MESHES[0], *map(broad, MESHES[1:])])
@pytest.mark.parametrize("call", CALLS)
def test_results_and_gradients(call: str, mesh: str) -> None:
    torch.manual_seed(0)
    step_means_itself(Factored(call, 6.0), X, mesh)


@pytest.mark.parametrize("call", [call for call in CALLS if call != "lu_factor"])
def test_a_matrix_that_torch_refuses_gives_nan_alone(call: str) -> None:
    model = Factored(call, 0.0)
    with torch.no_grad():
        model.up.weight.copy_(torch.eye(5))
    x = torch.eye(5).repeat(3, 1, 1)
    x[1, 4, 4] = 0.0
    with pytest.raises(torch.linalg.LinAlgError):
        model(x)
    with one_rank() as mesh, torch.no_grad():
        found = meshc.compile(model, mesh, kwargs={"x": x})(x=x)
    assert found[1].isnan().any()
    torch.testing.assert_close(found[[0, 2]], CALLS[call](x[[0, 2]]))
