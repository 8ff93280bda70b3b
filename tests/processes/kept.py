"""State kept in fewer bits, on two ranks: trained, saved, loaded under another mesh, trained on, and compared with training that never
stopped on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshc
from tests.meaning import test_kept_state as one_device
from tests.processes.session import device_mesh

ADAMW = one_device.OPTIMIZERS["adamw"]


def run() -> None:
    dist.init_process_group("gloo")
    for name, check in (("float64", _float64), ("masters", _masters)):
        check()
        if dist.get_rank() == 0:
            print(name)
    dist.barrier()
    dist.destroy_process_group()


def _trained(model: nn.Module, mesh: str, data: one_device.Batches, loss: one_device.Loss, state: dict[str, Any] | None, **keep: Any):  # type: ignore[no-untyped-def]
    """What a checkpoint holds after steps on these batches, and the optimizer."""
    optimizer = ADAMW(model.parameters())
    step = meshc.TrainStep(model, optimizer=optimizer, loss=loss)
    options = meshc.Options(seed=one_device.SEED, **keep)
    program = meshc.compile(step, device_mesh(mesh), args=(data[0][0],), kwargs={"target": data[0][1]}, options=options)
    if state is not None:
        program.load_state_dict(state)
    for x, y in data:
        program(x, target=y)
    rows = [program.state_dict(full=True)]
    dist.broadcast_object_list(rows, src=0)
    return rows[0], optimizer


def _float64() -> None:
    data = one_device.batches(one_device.normal)
    keep = {"optimizer_state": "bf16"}
    state, optimizer = _trained(one_device.Model().double(), "dp_shard=2", data[:2], F.mse_loss, None, **keep)
    assert {slot["exp_avg"].dtype for slot in optimizer.state_dict()["state"].values()} == {torch.bfloat16}
    state, _ = _trained(one_device.Model(5).double(), "tp=2", data[2:], F.mse_loss, state, **keep)
    model = one_device.Model().double()
    wanted = one_device.alone(model, ADAMW(model.parameters()), data, F.mse_loss, keep=True, clip=None)
    for path, p in model.named_parameters():
        torch.testing.assert_close(state["model"][path], p.detach(), rtol=1e-12, atol=1e-12)
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state["optim"]["state"][path][slot].double(), wanted[f"{path}/{slot}"])


def _masters() -> None:
    data = one_device.batches(one_device.small_integers)
    keep = {"master_weights": True}
    half = torch.bfloat16
    state, _ = _trained(one_device.Sum().to(half), "dp_shard=2", data[:2], one_device.weighed, None, **keep)
    last, _ = _trained(one_device.Sum(5).to(half), "tp=2", data[2:], one_device.weighed, state, **keep)
    model = one_device.Sum().to(half)
    optimizer = ADAMW(model.parameters())
    one_device.alone(model, optimizer, data, one_device.weighed, keep=False, clip=None)
    for (path, _), mine in zip(model.named_parameters(), optimizer.param_groups[0]["params"], strict=True):
        master = last["meshc"]["hidden"][f"{path}/meshc.master"]
        torch.testing.assert_close(master, mine.detach(), rtol=1e-5, atol=1e-7)
        assert torch.equal(last["model"][path], master.to(half))
    # a model loaded alone: its masters are those of other values, and do not count
    alone, _ = _trained(one_device.Sum(5).to(half), "dp_shard=2", data[:1], one_device.weighed, {"model": state["model"]}, **keep)
    fresh = one_device.Sum().to(half)
    fresh.load_state_dict(state["model"])
    optimizer = ADAMW(fresh.parameters())
    one_device.alone(fresh, optimizer, data[:1], one_device.weighed, keep=False, clip=None)
    for (path, _), mine in zip(fresh.named_parameters(), optimizer.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(alone["meshc"]["hidden"][f"{path}/meshc.master"], mine.detach(), rtol=1e-5, atol=1e-7)
