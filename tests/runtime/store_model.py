"""The small model of the store's tests, with tied, uneven and fused parameters; ways to store it, and what must hold then."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshc.errors import StateError
from meshc.ir import layouts
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding
from meshc.optimizer.optimizer import describe
from meshc.program.program import Port
from meshc.runtime.state.store import Store


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
    if not dist.is_initialized():
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
