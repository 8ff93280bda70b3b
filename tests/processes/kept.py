"""State kept in fewer bits, on two ranks: trained, saved, loaded under another mesh, trained on, and compared with training that never
stopped on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import meshc
from meshc.cost import peak_memory
from meshc.ops import block_codes
from tests.meaning import test_kept_state as one_device
from tests.meaning import test_state_in_8_bits as in_8_bits
from tests.processes.session import device_mesh

ADAMW = one_device.OPTIMIZERS["adamw"]


def run() -> None:
    dist.init_process_group("gloo")
    for name, check in (("float64", _float64), ("masters", _masters), ("8bit", _8bit), ("forms", _forms)):
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
    x, y = data[0] if data else (torch.zeros(8, 10), torch.zeros(8, 10))
    program = meshc.compile(step, device_mesh(mesh), args=(x,), kwargs={"target": y}, options=options)
    if state is not None:
        program.load_state_dict(state)
    for x, y in data:
        program(x, target=y)
    held = sum(value.to_local().nbytes if isinstance(value, DTensor) else value.nbytes for value in _states(optimizer))
    assert held == peak_memory.peak_rank(program.compiled).kept["state"] or keep.get("master_weights"), held
    rows = [program.state_dict(full=True)]
    dist.broadcast_object_list(rows, src=0)
    return rows[0], optimizer


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for slots in optimizer.state.values() for value in slots.values()]


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


def _8bit() -> None:
    """Codes on one mesh, read on another, which goes on where the first stopped: what never stopped on one device leaves."""
    data = one_device.batches(one_device.normal)
    keep = {"optimizer_state": "8bit"}
    state, optimizer = _trained(in_8_bits.Model().double(), "dp_shard=2", data[:2], F.mse_loss, None, **keep)
    weight = optimizer.param_groups[0]["params"][2]
    kinds = {name: value.dtype for name, value in optimizer.state[weight].items()}
    moments = {f"{moment}.{part}" for moment in ("exp_avg", "exp_avg_sq") for part in ("codes", "scale")}
    assert kinds.keys() == {*moments, "step"} and kinds["exp_avg.codes"] == torch.uint8 and kinds["exp_avg.scale"] == torch.float32
    last, _ = _trained(in_8_bits.Model(5).double(), "tp=2", data[2:], F.mse_loss, state, **keep)
    model = in_8_bits.Model().double()
    wanted = in_8_bits.alone(model, ADAMW(model.parameters()), data, F.mse_loss, clip=None)
    for path, p in model.named_parameters():
        torch.testing.assert_close(last["model"][path], p.detach(), rtol=1e-12, atol=1e-12)
    for name, value in wanted.items():
        path, _, slot = name.rpartition("/")
        found = last["optim"]["state"][path][slot]
        assert torch.equal(found, value) if slot.endswith((".codes", ".scale")) else torch.allclose(found, value, rtol=1e-12, atol=1e-12)


def _forms() -> None:
    """State in full, in 16 bits and in 8, each read where another is kept: as a checkpoint, and through the optimizer's own loader."""
    data = one_device.batches(one_device.normal)[:1]
    path, slot = "layers.0.3.weight", "exp_avg"
    kept = {kind: _trained(in_8_bits.Model(), "dp_shard=2", data32(data), F.mse_loss, None, optimizer_state=kind) for kind in KINDS}
    wide = {kind: _wide(state["optim"]["state"][path], slot) for kind, (state, _) in kept.items()}
    scale = wide[None].abs().max()
    for kind, (state, _) in kept.items():
        for other in KINDS:
            found, optimizer = _trained(in_8_bits.Model(5), "tp=2", [], F.mse_loss, state, optimizer_state=other)
            mine = _wide(found["optim"]["state"][path], slot)
            step = {None: 0.0, "bf16": 2.0**-8, "8bit": 0.9 / 128}[other]
            assert (mine - wide[kind]).abs().max() <= step * scale, (kind, other)
            assert (kind != other) or torch.equal(mine, wide[kind]), (kind, other)
            names = {name.rpartition(".")[2] for slots in optimizer.state.values() for name in slots if name.startswith(slot)}
            assert ("codes" in names) == (other == "8bit")
    # what torch's loader puts into an optimizer is taken over at the next call
    model, loaded = in_8_bits.Model(), in_8_bits.Model(5)
    torchs = ADAMW(model.parameters())
    F.mse_loss(model(data32(data)[0][0]), data32(data)[0][1]).backward()
    torchs.step()
    optimizer = ADAMW(loaded.parameters())
    step = meshc.TrainStep(loaded, optimizer=optimizer, loss=F.mse_loss)
    options = meshc.Options(seed=1, training=meshc.Training(optimizer_state="8bit"))
    x, y = data32(data)[0]
    program = meshc.compile(step, device_mesh("dp_shard=2"), args=(x,), kwargs={"target": y}, options=options)
    optimizer.load_state_dict(torchs.state_dict())
    weight = optimizer.param_groups[0]["params"][2]
    assert "exp_avg" not in optimizer.state[weight] and "exp_avg" in optimizer.state[optimizer.param_groups[0]["params"][0]]
    whole = block_codes.decode(
        *(optimizer.state[weight][f"exp_avg.{part}"].full_tensor() for part in ("codes", "scale")), True, torch.float32
    )
    wanted = torchs.state_dict()["state"][2]["exp_avg"]
    assert (whole - wanted).abs().max() <= 0.9 / 128 * wanted.abs().max() and program.state_dict()["meshc"]["step"] == 0


KINDS = (None, "bf16", "8bit")


def data32(data: one_device.Batches) -> one_device.Batches:
    return [(x.float(), y.float()) for x, y in data]


def _wide(slots: dict[str, torch.Tensor], slot: str) -> torch.Tensor:
    if slot in slots:
        return slots[slot].float()
    return block_codes.decode(slots[f"{slot}.codes"], slots[f"{slot}.scale"], True, torch.float32)
