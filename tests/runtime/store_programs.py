"""What the ranks of `test_store.py` run: a small model with tied, uneven and fused parameters, stored in several ways."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshc.errors import StateError
from meshc.mesh import Mesh
from meshc.optimizer import describe
from meshc.program import Port
from meshc.runtime import layouts
from meshc.runtime.store import Store
from meshc.sharding import Part, Sharding


class Net(nn.Module):
    """129 words, 4 heads of 2 in a fused projection, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(129, 8)
        self.attn = nn.Linear(8, 24)
        self.up = nn.Linear(8, 16)
        self.up.bias.requires_grad_(False)
        self.head = nn.Linear(8, 129, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("calls", torch.tensor(7), persistent=False)


# Where each parameter lies; (size, axes) for each part of each dim.
PLANS = {
    "dp=2,tp=2": {
        "wte.weight": "129/dp/tp, 8",
        "attn.weight": "3*4/tp*2, 8/dp",
        "attn.bias": "3*4/tp*2",
        "up.weight": "16/tp, 8/dp",
        "up.bias": "16",
    },
    "dp=4,tp=1": {"wte.weight": "129/dp, 8", "attn.weight": "3*4/dp*2, 8", "attn.bias": "24", "up.weight": "16/dp, 8", "up.bias": "16/dp"},
    "dp=2": {"wte.weight": "129, 8/dp", "attn.weight": "24/dp, 8", "attn.bias": "24/dp", "up.weight": "16/dp, 8", "up.bias": "16/dp"},
    "tp=2": {"wte.weight": "129/tp, 8", "attn.weight": "3*4/tp*2, 8", "attn.bias": "3*4/tp*2", "up.weight": "16/tp, 8", "up.bias": "16/tp"},
    "dp=1": {"wte.weight": "129, 8", "attn.weight": "24, 8", "attn.bias": "24", "up.weight": "16, 8", "up.bias": "16"},
}
COPIES = {"dp=2,tp=2": ["attn.bias", "attn.weight", "wte.weight"], "dp=4,tp=1": ["attn.weight"], "tp=2": ["attn.bias", "attn.weight"]}


def sharding(text: str) -> Sharding:
    dims = []
    for dim in text.split(", "):
        parts = [part.split("/") for part in dim.split("*")]
        dims.append(tuple(Part("f", int(size), tuple(axes)) for size, *axes in parts))
    return Sharding(tuple(dims))


def model_ports(model: nn.Module, plan: str) -> list[Port]:
    ports = [Port("parameter", name, tuple(p.shape), p.dtype, sharding(PLANS[plan][name])) for name, p in model.named_parameters()]
    return ports + [Port("buffer", name, tuple(b.shape), b.dtype, None) for name, b in model.named_buffers()]


def adam_ports(ports: list[Port]) -> list[Port]:
    states = []
    for port in ports:
        if port.kind == "parameter" and port.name != "up.bias":
            slots = [("exp_avg", port.shape, port.sharding), ("exp_avg_sq", port.shape, port.sharding), ("step", (), Sharding())]
            states += [Port("state", f"{port.name}/{slot}", shape, torch.float32, at, port.name) for slot, shape, at in slots]
    return states


def start(plan: str) -> Mesh:
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*TypedStorage.*")
    dist.init_process_group("gloo")
    axes = [axis.split("=") for axis in plan.split(",")]
    names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
    return Mesh.of(init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names)))


def seeded_model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_values(store: Store, model: nn.Module, want: dict[str, Tensor]) -> None:
    """Buffers and live tensors have these values, wherever they lie."""
    for name, value in want.items():
        held = store.find(f"parameter:{name}") or store.find(f"buffer:{name}")
        tile = layouts.take_tile(value, held.sharding, store.transfers.sizes, store.transfers.coordinates)
        real = layouts.take_tile(torch.ones_like(value), held.sharding, store.transfers.sizes, store.transfers.coordinates) > 0
        assert held.buffer.shape == tile.shape, name
        assert torch.equal(held.buffer[real], tile[real]), name
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), want[name]), name


@contextmanager
def refused(*texts: str) -> Iterator[None]:
    try:
        yield
    except StateError as error:
        assert all(text in str(error) for text in texts), str(error)
    else:
        raise AssertionError(f"nothing was refused: {texts}")


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
    print("done")


def refuse_different_models() -> None:
    mesh = start("dp=2")
    model = seeded_model()
    if dist.get_rank():
        model.up = nn.Linear(8, 12)
    with refused("rank 1", "parameter:up.weight: torch.float32 [16, 8]", "parameter:up.weight: torch.float32 [12, 8]"):
        Store.adopt(model, [], mesh, "cpu")
    print("done")


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
        assert store.unfilled == ["attn.bias", "attn.weight", "calls", "scale", "up.bias", "up.weight", "wte.weight"]
        with refused("attn.bias", "load_state_dict", "dcp.load", "init_weights"):
            store.check_filled()
        return model, store

    model, store = build()
    dcp.load({"program": store}, checkpoint_id=f"{folder}/program")
    assert store.unfilled == ["calls"]
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
        store.init_weights(lambda whole_model: 1 / 0)
    with refused("left without values: ", "up.weight"):
        store.init_weights(lambda whole_model: nn.init.ones_(whole_model.wte.weight))

    def initialise(whole_model: nn.Module) -> None:
        assert dist.get_rank() == 0 and whole_model.head.weight is whole_model.wte.weight and whole_model.wte.weight.shape == (129, 8)
        original = seeded_model()
        for parameter, value in zip(whole_model.parameters(), original.parameters(), strict=True):
            parameter.data.copy_(value.data)
        whole_model.scale.copy_(original.scale)
        whole_model.calls.fill_(7)

    store.init_weights(initialise)
    store.check_filled()
    check_values(store, model, want)
    assert model.calls.item() == 7
    print("done")


def trained(plan: str, mesh: Mesh, seed: int = 0) -> tuple[Net, Store, torch.optim.Optimizer]:
    model = seeded_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    spec = describe(optimizer)
    ports = model_ports(model, plan)
    store = Store.adopt(model, ports, mesh, "cpu")
    store.adopt_optimizer(optimizer, adam_ports(ports), spec)
    return model, store, optimizer


def gradient(shape: torch.Size, step: int) -> Tensor:
    return torch.linspace(-1, 1, shape.numel()).view(shape) * (step + 1)


def single_device(steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = seeded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = gradient(parameter.shape, step)
        optimizer.step()
    return model, optimizer


def step_live(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """torch's own optimizer, on the live DTensors."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            full = gradient(parameter.shape, step)
            mesh, placements = parameter.device_mesh, parameter.placements
            replicated = DTensor.from_local(full, mesh, run_check=False)
            parameter.grad = replicated.redistribute(mesh, placements)
    optimizer.step()


def check_training(store: Store, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    reference, its_optimizer = single_device(steps)
    store.adopt_changes()
    for (name, live), parameter in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(whole(live.detach()), parameter, atol=1e-6), name
        held = store.find(f"parameter:{name}")
        assert torch.allclose(store.transfers.whole(held.buffer, held.sharding), parameter, atol=1e-6), name
        for slot, value in its_optimizer.state.get(parameter, {}).items():
            held = store.held[f"state:{name}/{slot}"]
            assert optimizer.state[live][slot] is held.live, (name, slot)
            assert torch.allclose(whole(held.live), value, atol=1e-6), (name, slot)
            assert torch.allclose(store.transfers.whole(held.buffer, held.sharding), value, atol=1e-6), (name, slot)


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
    print("done")


def save(plan: str, folder: str) -> None:
    mesh = start(plan)
    model, store, opt = trained(plan, mesh)
    for step in range(2):
        step_live(model, opt, step)
    store.seed, store.step = 11, 2
    dcp.save({"program": store}, checkpoint_id=f"{folder}/program")
    model_state, optimizer_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{folder}/plain")
    print("done")


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
    print("done")
