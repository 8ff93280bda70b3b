"""State of a program under a sparse line, as it is saved for products of sparse matrices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass, sparse_semi_structured_to_dense_cutlass

import meshc
from meshc.check.info import faults_of_info
from meshc.errors import StateError


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_masked_weights_are_what_torchs_sparse_products_take(mesh: DeviceMesh) -> None:
    """Its conversion, which runs on a CPU too, has room for two of each four, and gives back what it was given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)).bfloat16()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    program = meshc.compile(step, mesh, plan="sparse *: 2:4")
    for _ in range(2):
        program(torch.randn(4, 64).bfloat16(), target=torch.randn(4, 8).bfloat16())
    whole, masked = program.state_dict(full=True)["model"], program.state_dict(full=True, masked=True)["model"]
    assert whole.keys() == masked.keys()
    for name in ("0.weight", "2.weight"):
        assert torch.equal(sparse_semi_structured_to_dense_cutlass(*sparse_semi_structured_from_dense_cutlass(masked[name])), masked[name])
        assert bool((whole[name] != 0).all()) and int((masked[name] != 0).sum()) == masked[name].numel() // 2
    assert all(torch.equal(whole[name], masked[name]) for name in ("0.bias", "4.weight", "4.bias"))
    x = torch.randn(4, 64).bfloat16()
    with torch.no_grad():
        made = program.asked.module(x)
        model.load_state_dict(masked)
        assert torch.equal(program.asked.module(x), made)


def test_weights_have_the_mask_that_the_last_step_has_left(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False)
    first = layer.weight.detach().clone()
    step = meshc.TrainStep(nn.Sequential(layer), optimizer=torch.optim.SGD(layer.parameters(), lr=5.0), loss=F.mse_loss)
    program = meshc.compile(step, mesh, plan="sparse 0: 2:4, every 10")
    for _ in range(3):
        program(torch.randn(6, 8), target=torch.randn(6, 4))
    whole, masked = (program.state_dict(full=True, masked=masked)["model"]["0.weight"] for masked in (False, True))

    def mask(weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.meshc.is_largest(weight.unflatten(1, (-1, 4)), 2, 2).flatten(1)  # type: ignore[no-any-return]

    assert torch.equal(masked, whole * mask(first)) and not torch.equal(mask(first), mask(whole))


def test_a_part_is_not_masked(mesh: DeviceMesh) -> None:
    program = meshc.compile(nn.Linear(8, 4).requires_grad_(False), mesh, args=(torch.randn(2, 8),))
    with pytest.raises(StateError, match="is of whole tensors"):
        program.state_dict(masked=True)


@pytest.mark.parametrize("groups", [[2, 4], [4, 4, 1], [2, 4, -1], [2.0, 4, 1], [0, 4, 1], [2, 1000, 1], "2:4"], ids=str)
def test_groups_that_are_none_are_refused(groups: object) -> None:
    assert [*faults_of_info({"sparse": {"w": [2, 4, 1]}}, ())] == []
    assert "sparse is" in [*faults_of_info({"sparse": {"w": groups}}, ())][0]


def test_the_decay_is_added_once_to_gradients_of_several_calls(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False)
    first, rows, target = layer.weight.detach().clone(), torch.randn(2, 6, 8), torch.randn(2, 6, 4)
    step = meshc.TrainStep(nn.Sequential(layer), optimizer=torch.optim.SGD(layer.parameters(), lr=0.5), loss=F.mse_loss)
    options = meshc.Options(training=meshc.Training(accumulate=True))
    program = meshc.compile(step, mesh, plan="sparse 0: 2:4, decay 0.25", options=options)
    program.accumulate(rows[0], target=target[0])
    program(rows[1], target=target[1])
    masked = torch.ops.meshc.keep_largest(first.unflatten(1, (-1, 4)), 2, 2).flatten(1)
    read = masked.clone().requires_grad_()
    (F.mse_loss(rows[0] @ read.t(), target[0]) + F.mse_loss(rows[1] @ read.t(), target[1])).backward()
    assert read.grad is not None
    expected = first - 0.5 * (read.grad + 0.25 * (first - masked))
    torch.testing.assert_close(program.state_dict(full=True)["model"]["0.weight"], expected)
