"""Batch norms that average over calls, and a trace that has no number of their counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshc
from meshc.frontend.averaged_norms import averaged_norms
from tests.broad import broad


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.averaged = nn.BatchNorm2d(4, momentum=None)
        self.batch = nn.BatchNorm1d(4, momentum=None, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch(self.averaged(self.conv(x)).relu().mean((2, 3)))


def test_what_a_trace_takes_is_what_torch_does() -> None:
    """Over three batches, from statistics that stand already; in evaluation both are torch's own."""
    plain, traced = (nn.BatchNorm2d(4, momentum=None) for _ in range(2))
    for step in range(3):
        x = torch.randn(5, 4, 3, 3) * (step + 1)
        with averaged_norms():
            found = traced(x)
        assert torch.equal(found, plain(x))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(traced.named_buffers())[name], buffer)
    assert plain.num_batches_tracked == 3
    with averaged_norms(), pytest.raises(ValueError, match="expected 4D input"):
        traced(torch.randn(5, 4))


@pytest.mark.parametrize("mesh", ["dp=2", broad("dp=3"), broad("tp=2")])
def test_statistics_of_a_program_are_one_devices(mesh: str) -> None:
    program = meshc.compile(Norms(), meshc.Mesh(mesh), args=(torch.randn(6, 3, 4, 4),))
    report = meshc.verify(program, dtype=torch.float64)
    assert report.ok and {"averaged.running_mean", "averaged.running_var"} <= {name for _, name, _ in report.rows}
