"""Batch norms that average over calls, of which a trace has no number of their counter, and those that ranks synchronise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import meshc
from meshc.frontend.batch_norms import averaged_norms, synced_norms
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


def test_synchronised_norms_are_batch_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are ranks torch's own call takes none but CUDA's tensors, and sends."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.BatchNorm2d(4, momentum=None))
    first, second = (nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)) for _ in range(2))
    x = torch.randn(6, 3, 4, 4)
    wanted = model(x)
    with monkeypatch.context() as ranks:
        ranks.setattr(torch.distributed, "is_initialized", lambda: True)
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            first(x)
        for synced, within in ((first, averaged_norms), (second, synced_norms)):
            with within():
                torch.testing.assert_close(synced(x), wanted)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(second.get_buffer(name), buffer)
