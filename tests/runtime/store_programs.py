"""What the ranks of `test_store.py` run."""

from __future__ import annotations

import copy
import gc
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from meshc.ir import layouts
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Sharding
from meshc.optimizer.optimizer import FIRST, describe
from meshc.program.program import Port
from meshc.runtime.saved.initial_values import init_weights
from meshc.runtime.state.store import Store
from tests.runtime.store_model import (
    COPIES,
    Net,
    adam_ports,
    check_training,
    check_values,
    model_ports,
    refused,
    seeded_model,
    sharding,
    single_device,
    start,
    step_live,
    trained,
    whole,
)


def adopt(plan: str) -> None:
    mesh = start(plan)
    rank = dist.get_rank()
    want = {name: value.clone() for name, value in seeded_model().state_dict().items()}
    model = seeded_model(rank)  # rank 0's values count
    model.calls += rank
    old = model.wte.weight
    late = torch.optim.SGD([old], lr=0.1)
    ports = model_ports(model, plan)
    store = Store.adopt(model, ports, mesh, "cpu")
    assert Store.of(model) is store and list(store.held)[:2] == ["buffer:scale", "buffer:calls"], list(store.held)
    check_values(store, model, want)
    assert model.calls.item() == 7
    assert model.head.weight is model.wte.weight and isinstance(model.wte.weight, nn.Parameter)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["up.bias"]
    assert sorted(held.name for held in store.held.values() if not held.shared) == COPIES.get(plan, [])
    for name, parameter in model.named_parameters():
        held = store.find(f"parameter:{name}")
        same_memory = parameter.to_local().data_ptr() == held.buffer.data_ptr()
        assert same_memory == held.shared, name

    old.grad = torch.ones_like(old)
    with refused("wte.weight", "build the optimizer after meshc.compile"):
        late.step()

    # A program writes its buffers; the live tensors follow.
    for name, _ in model.named_parameters():
        store.buffer(f"parameter:{name}").add_(1)
        want[name] += 1
    want["head.weight"] = want["wte.weight"]
    store.mark_written()
    check_values(store, model, want)
    store.adopt_changes()
    check_values(store, model, want)
    full = store.state_dict(full=True)
    if rank:
        assert full == {}
    else:
        assert list(full["model"]) == list(want) and all(torch.equal(full["model"][name], want[name]) for name in want)
        assert full["model"]["head.weight"] is full["model"]["wte.weight"]

    # A user writes the live tensors, or puts others in their place; the buffers follow.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        model.scale.add_(1)
    want = {name: value * 2 if name != "scale" else value + 1 for name, value in want.items()}
    store.adopt_changes()
    check_values(store, model, want)
    want = {name: value + 5 for name, value in want.items()}
    parameter = model.attn.weight
    with torch.no_grad():
        model.load_state_dict({name: v + 5 for name, v in model.state_dict().items()})
    check_values(store, model, want)
    model.load_state_dict({name: v.detach() - 5 for name, v in model.state_dict().items()}, assign=True)
    assert model.attn.weight is parameter
    want = {name: value - 5 for name, value in want.items()}
    store.adopt_changes()
    check_values(store, model, want)

    # Where both have written, one would be lost.
    if plan in COPIES:
        store.mark_written()
        with torch.no_grad():
            model.attn.weight.mul_(2)
        with refused("attn.weight", "program.sync()"):
            store.adopt_changes()
        store.find("parameter:attn.weight").seen = store.find("parameter:attn.weight").version()
        store.sync()

    # A second program of the model has the first's storage.
    assert Store.adopt(model, ports, mesh, "cpu") is store
    other = [Port("parameter", "up.weight", (16, 8), torch.float32, sharding("16, 8" if mesh.world_size > 1 else "8, 16"))]
    with refused("up.weight", "share one storage"):
        Store.adopt(model, other, mesh, "cpu")
    with refused("a second program of it cannot be for"):
        Store.adopt(model, ports, Mesh("x=8"), "cpu")


def refuse_different_models(plan: str) -> None:
    mesh = start(plan)
    model = seeded_model()
    if dist.get_rank():
        model.up = nn.Linear(8, 12)
    with refused("rank 1", "parameter:up.weight: torch.float32 [16, 8]", "parameter:up.weight: torch.float32 [12, 8]"):
        Store.adopt(model, [], mesh, "cpu")


def meta(plan: str, folder: str) -> None:
    mesh = start(plan)
    want = {name: value.clone() for name, value in seeded_model().state_dict().items()}
    source = seeded_model()
    saved = Store.adopt(source, model_ports(source, plan), mesh, "cpu")
    dcp.save({"program": saved}, checkpoint_id=f"{folder}/program")
    dcp.save(source.state_dict(), checkpoint_id=f"{folder}/plain")

    def build() -> tuple[Net, Store]:
        with torch.device("meta"):
            model = Net()
        store = Store.adopt(model, model_ports(model, plan), mesh, "cpu")
        assert store.unfilled_names == ["attn.bias", "attn.weight", "calls", "scale", "up.bias", "up.weight", "wte.weight"]
        with refused("attn.bias", "load_state_dict", "dcp.load", "init_weights"):
            store.check_filled()
        return model, store

    model, store = build()
    dcp.load({"program": store}, checkpoint_id=f"{folder}/program")
    assert store.unfilled_names == ["calls"]
    model.calls = torch.tensor(7)
    store.adopt_changes()
    store.check_filled()
    check_values(store, model, want)

    model, store = build()
    model.calls.fill_(7)
    dcp.load(model.state_dict(), checkpoint_id=f"{folder}/plain")  # in place, and never loaded
    store.check_filled()
    check_values(store, model, want)

    model, store = build()
    model.calls.fill_(7)
    store.load_state_dict(want)
    store.check_filled()
    check_values(store, model, want)

    model, store = build()
    with refused("ZeroDivisionError"):
        init_weights(store, lambda whole_model: 1 / 0)
    with refused("left without values: ", "up.weight"):
        init_weights(store, lambda whole_model: nn.init.ones_(whole_model.wte.weight))

    original = seeded_model()

    def initialise(whole_model: nn.Module) -> None:
        assert whole_model.head.weight is whole_model.wte.weight and whole_model.wte.weight.shape == (129, 8)
        for parameter, value in zip(whole_model.parameters(), original.parameters(), strict=True):
            parameter.data.copy_(value.data)
        whole_model.scale.copy_(original.scale)
        whole_model.calls.fill_(7)

    init_weights(store, initialise)
    store.check_filled()
    check_values(store, model, want)
    assert model.calls.item() == 7


def optimizer(plan: str) -> None:
    mesh = start(plan)
    model, store, opt = trained(plan, mesh, seed=dist.get_rank())
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    state = opt.state[model.attn.weight]
    assert list(state) == ["exp_avg", "exp_avg_sq", "step"] and state["step"].shape == () and not isinstance(state["step"], DTensor)
    assert state["exp_avg"].placements == model.attn.weight.placements
    assert len(opt.state_dict()["state"]) == 4  # none for up.bias, which is frozen
    check_training(store, model, opt, 0)
    for step in range(2):
        step_live(model, opt, step)
        check_training(store, model, opt, step + 1)

    # Through torch's state dicts, after a program has written.
    for held in store.held.values():
        if held.of:
            held.buffer.mul_(2)
    store.mark_written()
    before = {name: {slot: whole(v).clone() for slot, v in slots.items()} for name, slots in store.state_dict()["optim"]["state"].items()}
    assert torch.equal(before["up.weight"]["step"], torch.tensor(4.0))
    model_state, optimizer_state = get_state_dict(model, opt)
    assert torch.equal(whole(optimizer_state["state"]["attn.weight"]["exp_avg"]), before["attn.weight"]["exp_avg"])
    with torch.no_grad():
        changed = {name: {slot: v * 3 for slot, v in slots.items()} for name, slots in optimizer_state["state"].items()}
    optimizer_state["param_groups"][0]["lr"] = 0.5
    set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict={**optimizer_state, "state": changed})
    assert opt.param_groups[0]["lr"] == 0.5
    for name, slots in before.items():
        for slot, value in slots.items():
            held = store.held[f"state:{name}/{slot}"]
            assert opt.state[model.get_parameter(name)][slot] is held.live
            assert torch.equal(store.transfers.whole(held.buffer, held.sharding), value * 3), (name, slot)

    # As if new: torch would create this state at the next step.
    opt.state.clear()
    store.adopt_changes()
    assert all(whole(held.live).count_nonzero() == 0 for held in store.held.values() if held.of)

    # A new optimizer begins anew, once the old one is gone.
    store.buffer("state:up.weight/step").fill_(5)
    del opt
    gc.collect()
    new = torch.optim.AdamW(model.parameters())
    store.adopt_optimizer(new, adam_ports(model_ports(model, plan)), describe(new))
    assert new.state[model.up.weight]["step"].item() == 0


def resumed(plan: str) -> None:
    """An optimizer that has stepped on plain tensors before it is taken over; its state is stored apart from the parameters."""
    mesh = start(plan)
    model, opt = single_device(2)
    spec = describe(opt)
    ports = model_ports(model, plan)
    store = Store.adopt(model, [Port(p.kind, p.name, p.shape, p.dtype, None) for p in ports], mesh, "cpu")
    assert all(layouts.splitting_axes(held.sharding, mesh) == () for held in store.held.values())
    store.adopt_optimizer(opt, adam_ports(ports), spec)
    if mesh.world_size > 1:
        assert opt.state[model.up.weight]["exp_avg"].placements != model.up.weight.placements
    check_training(store, model, opt, 2)
    other = torch.optim.AdamW(model.parameters())
    with refused("another AdamW updates this already", "a parameter has one optimizer"):
        store.adopt_optimizer(other, adam_ports(ports), describe(other))


def hidden_state(plan: str, folder: str) -> None:
    """SGD's first step differs from the others, which torch knows from the absence of state and a program from a slot of its own."""
    mesh = start(plan)

    def build() -> tuple[Net, Store, torch.optim.Optimizer]:
        model = seeded_model()
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        spec = describe(opt)
        ports = model_ports(model, plan)
        states = []
        for port in ports:
            if port.kind == "parameter" and port.name != "up.bias":
                states.append(Port("state", f"{port.name}/momentum_buffer", port.shape, port.dtype, port.sharding, port.name))
                states.append(Port("state", f"{port.name}/{FIRST}", (), torch.float32, Sharding(), port.name))
        store = Store.adopt(model, ports, mesh, "cpu")
        store.adopt_optimizer(opt, states, spec)
        return model, store, opt

    model, store, opt = build()
    first = store.held[f"state:up.weight/{FIRST}"]
    assert first.buffer.item() == 1 and list(opt.state[model.up.weight]) == ["momentum_buffer"]
    first.buffer.zero_()
    store.buffer("state:up.weight/momentum_buffer").fill_(3)
    store.mark_written()
    dcp.save({"program": store}, checkpoint_id=f"{folder}/program")
    model_state, optimizer_state = get_state_dict(model, opt)

    model, store, opt = build()
    dcp.load({"program": store}, checkpoint_id=f"{folder}/program")
    assert store.buffer(f"state:up.weight/{FIRST}").item() == 0 and store.buffer(f"state:attn.weight/{FIRST}").item() == 1
    assert (whole(opt.state[model.up.weight]["momentum_buffer"]) == 3).all()

    model, store, opt = build()
    store.load_state_dict({"model": model_state, "optim": optimizer_state})
    assert store.buffer(f"state:up.weight/{FIRST}").item() == 0
    copied = copy.deepcopy(model)  # a model of its own, with no store
    assert Store.of(copied) is None and torch.equal(whole(copied.state_dict()["attn.weight"]), whole(model.state_dict()["attn.weight"]))


def save(plan: str, folder: str) -> None:
    mesh = start(plan)
    model, store, opt = trained(plan, mesh)
    for step in range(2):
        step_live(model, opt, step)
    store.seed, store.step = 11, 2
    dcp.save({"program": store}, checkpoint_id=f"{folder}/program")
    model_state, optimizer_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{folder}/plain")


def load(plan: str, folder: str) -> None:
    mesh = start(plan)
    model, store, opt = trained(plan, mesh, seed=3)
    dcp.load({"program": store}, checkpoint_id=f"{folder}/program")
    assert (store.seed, store.step) == (11, 2)
    check_training(store, model, opt, 2)
    step_live(model, opt, 2)
    check_training(store, model, opt, 3)

    # Files of get_state_dict, through the program and through torch.
    state = {name: part for name, part in store.state_dict().items() if name != "meshc"}
    dcp.load(state, checkpoint_id=f"{folder}/plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.load_state_dict(state)
    assert any("start again at step 0" in str(warning.message) for warning in caught) and store.step == 0
    check_training(store, model, opt, 2)
    step_live(model, opt, 2)
    model_state, optimizer_state = get_state_dict(model, opt)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{folder}/plain")
    set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=optimizer_state)
    check_training(store, model, opt, 2)
    assert opt.param_groups[0]["betas"] == (0.9, 0.999)
    with refused("up.bias is missing", "more is not in the model", "wte.weight is of shape [3]"):
        names = {name: value for name, value in store.state_dict()["model"].items() if name != "up.bias"}
        store.load_state_dict({"model": {**names, "more": torch.ones(1), "wte.weight": torch.ones(3)}})


def run(plan: str, folder: str, *names: str) -> None:
    """One after another in the same processes, whose start takes longer than any of these."""
    for name in names:
        function = globals()[name]
        function(plan, folder) if name in ("meta", "hidden_state", "save", "load") else function(plan)
    dist.barrier()
    dist.destroy_process_group()
    print("done")
