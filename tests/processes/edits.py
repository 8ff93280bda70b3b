"""Edits and reads of a compiled model's tensors through views, and what ranks save of them by themselves, beside one device, in float64.
Each function is one check."""

from __future__ import annotations

import copy
import operator
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshc
from tests.processes.session import run_checks

X, Y = torch.arange(12).reshape(3, 4) % 10, torch.arange(12).reshape(3, 4) * 3 % 10
ROW = torch.arange(7, dtype=torch.float64)
MASK = torch.arange(70).reshape(10, 7) % 3 == 0


class Words(nn.Module):
    """Ten rows of seven: uneven on two ranks and on four, along either dim."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 7, padding_idx=0)
        self.head = nn.Linear(7, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(x).tanh()).flatten(0, 1), y.flatten())


class Pair:
    """A compiled model that a loop of one's own trains, and its twin on one device."""

    def __init__(self, mesh: Any, step: bool = False) -> None:
        torch.manual_seed(0)
        self.models = mine, twin = Words().double(), Words().double()
        twin.load_state_dict(mine.state_dict())
        self.step: Any = None
        if step:
            optimizer = torch.optim.Adam(mine.parameters(), lr=0.01)
            self.step = meshc.compile(meshc.TrainStep(mine, optimizer=optimizer), mesh, args=(X, Y))
        else:
            self.program = meshc.compile(mine, mesh, args=(X, Y))
            optimizer = torch.optim.Adam(mine.parameters(), lr=0.01)
        self.optimizers = optimizer, torch.optim.Adam(twin.parameters(), lr=0.01)

    def train(self) -> None:
        """One step of both, with the same loss."""
        found = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if model is self.models[0] and self.step is not None:
                found.append(self.step(X, Y).detach())
                self.step.sync()  # what is seen of uneven tiles is a copy
                continue
            loss = model(X, Y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        torch.testing.assert_close(*found, rtol=1e-10, atol=0)

    def tensors(self) -> Iterator[tuple[Any, Any]]:
        """What is edited: two parameters, and a state of each."""
        for name in ("embed.weight", "head.weight"):
            mine, twin = (model.get_parameter(name) for model in self.models)
            yield mine, twin
            yield self.optimizers[0].state[mine]["exp_avg"], self.optimizers[1].state[twin]["exp_avg"]


def whole(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def assigned(w: Any) -> None:
    w[3] = 1.5
    w[4] = ROW
    w[-2:] = torch.stack([ROW, -ROW])
    w[:, 1] = torch.arange(10, dtype=torch.float64)
    w[2, 5] = 9
    w[7] = w[8]
    w[8:] = w[:7].mean(0)
    w[3] += 1
    w[3:5] *= 2


def chosen(w: Any) -> None:
    w[MASK] = 0
    w[w.abs() < 0.1] = 0.25
    w[[1, 7]] = 0.5
    w[torch.tensor([2, 9])] = torch.stack([ROW, ROW])
    w.masked_fill_(~MASK & (torch.arange(7) == 2), -1)
    w[2:6].masked_fill_(MASK[2:6], 2)
    w.index_fill_(0, torch.tensor([6]), 0.75)
    w.index_copy_(0, torch.tensor([0, 8]), torch.stack([ROW, ROW]))
    w.index_add_(1, torch.tensor([0, 6]), torch.ones(10, 2, dtype=torch.float64))
    w.scatter_(0, torch.full((1, 7), 9), 3.0)


def in_turn(w: Any) -> None:
    """Views that stand beside each other show what was written through one of them."""
    a, b = w.chunk(2)
    a.mul_(2)
    b.zero_()
    a.add_(b)
    for number, row in enumerate(w):
        row.add_(number)
    for part in w.split(5):
        nn.init.zeros_(part[1:2])
    rows = [*w.unbind(0)]
    rows[9].fill_(1)
    torch._foreach_mul_([w[2], w[8]], 3.0)
    torch.add(w[2], rows[9], out=w[2])
    w[3].lerp_(w[4], 0.5)


def drawn_rows(w: Any) -> None:
    torch.manual_seed(5)
    nn.init.normal_(w[3:5])
    nn.init.xavier_uniform_(w[5:])


EDITS: tuple[Callable[[Any], Any], ...] = (
    lambda w: w[3].zero_(), lambda w: w[3:5].mul_(2), lambda w: w.narrow(0, 4, 3).fill_(1), lambda w: w.narrow(1, 2, 3).neg_(),
    lambda w: w.view(-1)[5:8].zero_(), lambda w: w.diagonal().fill_(1), lambda w: w.t()[1].zero_(), lambda w: w.T[1:3, 2:].add_(1),
    lambda w: w.data[3].fill_(2), lambda w: w.detach()[9].zero_(), lambda w: w.select(1, 3).zero_(), lambda w: w.unfold(0, 2, 2)[1].zero_(),
    lambda w: w.unflatten(0, (5, 2))[1].mul_(3), lambda w: w[1:9:3, 2:5].zero_(), lambda w: w.flatten()[33:50].clamp_(-0.1, 0.1),
    lambda w: w[None, 4:5].squeeze(1).sub_(1), lambda w: w.permute(1, 0)[:, 9].zero_(), lambda w: w.fill_diagonal_(2.0),
    lambda w: w.tril_(), lambda w: w.copy_(ROW.expand(10, 7)), assigned, chosen, in_turn, drawn_rows,
)  # fmt: skip


def edited(mesh: Any) -> None:
    """Each edit, of parameters and of an optimizer's state, is what it is on one device; training goes on with it."""
    pair = Pair(mesh)
    pair.train()
    for number, edit in enumerate(EDITS):
        for mine, twin in pair.tensors():
            with torch.no_grad():
                edit(twin)
                edit(mine)
            torch.testing.assert_close(whole(mine), twin.detach(), rtol=1e-12, atol=1e-12, msg=lambda text, n=number: f"edit {n}: {text}")
        if number % 6 == 5:
            pair.train()
    pair.models[0].embed._fill_padding_idx_with_zero()
    pair.models[1].embed._fill_padding_idx_with_zero()
    pair.train()


def edited_beside_a_step(mesh: Any) -> None:
    """Likewise where a program steps, over pipeline stages too: what each stage holds is edited."""
    pair = Pair(mesh, step=True)
    for edit in (EDITS[0], EDITS[4], lambda w: w.data[3].fill_(2), assigned, chosen):
        pair.train()
        for mine, twin in pair.tensors():
            with torch.no_grad():
                edit(twin)
                edit(mine)
    pair.train()


def averages_before(mesh: Any) -> None:
    """Averages that were plain tensors before the model was compiled, a mask, and a penalty on what weights were: as on one device."""
    rows = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = Words().double()
        shadows, anchors = ([one.detach().clone() for one in model.parameters()] for _ in range(2))
        averaged, copied = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), copy.deepcopy(model)
        called = meshc.compile(model, mesh, args=(X, Y)) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            penalty: Any = sum(((one - anchor) ** 2).sum() for one, anchor in zip(model.parameters(), anchors, strict=True))
            (called(X, Y) + (penalty.full_tensor() if compiled else penalty)).backward()
            optimizer.step()
            lists: Any = [*model.parameters()], [*copied.parameters()]
            with torch.no_grad():
                for one, shadow in zip(model.parameters(), shadows, strict=True):
                    one.mul_(torch.arange(one.numel()).reshape(one.shape) % 5 > 0)
                    shadow.sub_(0.1 * (shadow - one))
                torch._foreach_lerp_(lists[1], lists[0], weight=0.1)
            averaged.update_parameters(model)
        with torch.no_grad():
            torch._foreach_copy_([one.data for one in model.parameters()], shadows)
        assert not any(isinstance(one, DTensor) for one in (*shadows, *averaged.parameters(), *copied.parameters()))
        rows.append([*shadows, *averaged.parameters(), *copied.parameters(), *map(whole, model.parameters())])
    torch.testing.assert_close(*rows, rtol=1e-12, atol=1e-12)
    loss = F.mse_loss(torch.ones(3, requires_grad=True), torch.zeros(3))
    penalty = sum(one.square().sum() for one in Pair(mesh).models[0].parameters())
    for add in (operator.add, operator.iadd):
        with pytest.raises(meshc.StateError, match=r"add_?.Tensor of a plain tensor of shape \[\] and a DTensor .* with gradients"):
            add(loss, penalty)


def looked_at(mesh: Any) -> None:
    """A view is read as what it was taken of, differentiated through, copied and saved; after another write it has to be taken again."""
    pair = Pair(mesh)
    mine, twin = (model.embed.weight for model in pair.models)
    reads: tuple[Callable[[Any], Any], ...] = (
        lambda w: w[3], lambda w: w[3:5].sum(1), lambda w: w * w[3], lambda w: w[[1, 2]], lambda w: w.diagonal(), lambda w: w[3].clone(),
    )  # fmt: skip
    for read in reads:
        torch.testing.assert_close(whole(read(mine)), read(twin))
    for one in (mine, twin):
        one[3:5].square().sum().backward()
    torch.testing.assert_close(whole(mine.grad), twin.grad)
    taken = mine.detach()[3]
    assert torch.equal(whole(copy.deepcopy(taken)), twin[3]) and "GatheredView" not in repr(taken)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(taken, f"{folder}/row.pt")
        assert type(torch.load(f"{folder}/row.pt", weights_only=False)) is DTensor
    with torch.no_grad():
        taken.mul_(2)
        torch.testing.assert_close(whole(taken), 2 * twin[3])
        mine.mul_(2)
    with pytest.raises(meshc.StateError, match=r"(?s)a view of shape \[7\].*take the view again"):
        taken.sum()


def numbers(mesh: Any) -> None:
    """Of a part no number is read; of what every rank has whole each is, and what was summed up is."""
    pair = Pair(mesh)
    for model in pair.models:
        model(X, Y).backward()
    mine, twin = (model.head.weight for model in pair.models)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: mine.grad.norm().item(), lambda: float(mine.sum()), lambda: f"{mine.sum():.3f}",
    )  # fmt: skip
    for call in calls:
        with pytest.raises(meshc.StateError, match=r"(?s)item\(\) was asked of a number of .* a part: .*\.full_tensor\(\)\.item\(\)"):
            call()
    for name in ("tolist", "numpy"):
        with pytest.raises(meshc.StateError, match=rf"(?s){name}\(\) was asked of .* \[10, 7\] .*full_tensor\(\)\.{name}\(\)"):
            getattr(mine.detach(), name)()
    with pytest.raises(meshc.StateError, match="numpy"):
        np.asarray(mine.grad)
    for one in (mine, twin):
        with torch.no_grad():
            one.grad[9, 6] = float("nan")  # which the last rank has
        assert torch.isnan(one.grad).any() and not torch.isfinite(one.grad).all() and torch.isfinite(one.grad[:9]).all()
        assert not (torch.isfinite(one.grad).all() or torch.isinf(one.grad).any())
        with torch.no_grad():
            one.grad[9, 6] = 0.5
    norm = mine.grad.norm().full_tensor()
    assert abs(norm.item() - twin.grad.norm().item()) < 1e-12 and bool(mine.grad.norm() > 1e-9)
    total = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in pair.models]
    assert f"{total[0]:.9f}" == f"{total[1]:.9f}" and abs(total[0].item() - total[1].item()) < 1e-12
    assert "Partial" in str(mine.sum()) and "local_tensor" in repr(mine)


def numbers_of_wholes(mesh: Any) -> None:
    """On a mesh where parameters are whole on every rank."""
    pair = Pair(mesh)
    mine, twin = (model.head.weight for model in pair.models)
    assert mine.tolist() == twin.tolist() and np.array_equal(mine.detach().numpy(), twin.detach().numpy())
    assert mine.norm().item() == twin.norm().item() and mine[3, 2].item() == twin[3, 2].item()
    assert f"{mine.sum():.6f}" == f"{twin.sum():.6f}"
    with pytest.raises(RuntimeError, match="requires grad"):
        mine.numpy()


@contextmanager
def said() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [f"{one.filename}: {one.message}" for one in caught if "holds DTensors" in str(one.message)]


def place() -> Path:
    """A folder of all ranks."""
    found = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(found)
    return Path(found[0])


def saved_by_each(mesh: Any) -> None:
    """Files that each rank writes for itself: they load there, on this mesh and on another of these ranks; asking is warned of once."""
    folder, rank = place(), dist.get_rank()
    for step in (False, True):
        pair = Pair(mesh, step)
        pair.train()
        with said() as words:
            for _ in range(2):
                state = {"model": pair.models[0].state_dict(), "optimizer": pair.optimizers[0].state_dict()}
        assert [one.partition(" holds")[0].rpartition(" ")[2] for one in words] == ["Words", "Adam"], words
        assert all(one.startswith(__file__) for one in words)
        assert ('(state["optim"])' if step else "get_optimizer_state_dict(model, optimizer") in words[1]
        torch.save(state, folder / f"{step}.{rank}.pt")
        torch.save(pair.optimizers[1].state_dict(), folder / f"plain.{step}.{rank}.pt")
        pair.train()
        wanted = [whole(p) for p in pair.models[0].parameters()]
        for where in (mesh, torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))):
            again = Pair(where, step)
            found = torch.load(folder / f"{step}.{rank}.pt", weights_only=False)
            again.models[0].load_state_dict(found["model"])
            again.optimizers[0].load_state_dict(found["optimizer"])
            again.models[1].load_state_dict({name: whole(value) for name, value in again.models[0].state_dict().items()})
            again.optimizers[1].load_state_dict(torch.load(folder / f"plain.{step}.{rank}.pt"))
            again.train()
            for one, other in zip(again.models[0].parameters(), wanted, strict=True):
                torch.testing.assert_close(whole(one), other)


def saved_by_any(mesh: Any) -> None:
    """Where a rank has all of each tensor, rank 0 alone writes what a plain model's file holds; it loads wherever that does."""
    folder = place()
    for step in (False, True):
        pair = Pair(mesh, step)
        pair.train()
        if dist.get_rank() == 0:
            with said() as words:
                state: dict[str, Any] = {"model": pair.models[0].state_dict(), "optimizer": pair.optimizers[0].state_dict()}
                state["loose"] = [*pair.models[0].parameters()]
            assert not words and isinstance(state["model"]["head.weight"], DTensor)
            torch.save(state, folder / f"{step}.pt")
        dist.barrier()
        found, (plain, theirs) = torch.load(folder / f"{step}.pt"), (pair.models[1], pair.optimizers[1])
        torch.testing.assert_close(found["model"], dict(plain.state_dict()))
        assert {type(one) for one in found["model"].values()} == {Tensor} and {type(one) for one in found["loose"]} == {nn.Parameter}
        for number, slots in theirs.state_dict()["state"].items():
            torch.testing.assert_close(found["optimizer"]["state"][number]["exp_avg"], slots["exp_avg"])
        plain.load_state_dict(found["model"])
        theirs.load_state_dict(torch.load(folder / f"{step}.pt")["optimizer"])
        again = Pair(mesh, step)
        again.models[0].load_state_dict(found["model"])
        again.optimizers[0].load_state_dict(found["optimizer"])
        again.models, again.optimizers = (again.models[0], plain), (again.optimizers[0], theirs)
        again.train()
        again.train()


def saved_whole(mesh: Any) -> None:
    """What the warning says to write of a loop's optimizer: rank 0 has whole tensors, and they load."""
    pair, options = Pair(mesh), StateDictOptions(full_state_dict=True, cpu_offload=True)
    pair.train()
    (mine, _), (optimizer, theirs) = pair.models, pair.optimizers
    with said() as words:
        state = get_optimizer_state_dict(mine, optimizer, options=options)
    assert not words and bool(state) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        torch.testing.assert_close(state["state"]["head.weight"]["exp_avg"], theirs.state[pair.models[1].head.weight]["exp_avg"])
    given = [state]
    dist.broadcast_object_list(given)
    pair.optimizers = torch.optim.Adam(mine.parameters(), lr=0.5), theirs
    set_optimizer_state_dict(mine, pair.optimizers[0], given[0], options=options)
    pair.train()
    pair.train()


def saved_by_rank_0(mesh: Any) -> None:
    """The file of rank 0 holds its parts: rank 1 refuses it by names and shapes, and rank 0 learns of that."""
    folder = place()
    pair = Pair(mesh)
    pair.train()
    if dist.get_rank() == 0:
        torch.save(pair.optimizers[0].state_dict(), folder / "optimizer.pt")
    dist.barrier()
    found = torch.load(folder / "optimizer.pt", weights_only=False)
    if dist.get_rank() == 1:
        words = r"(?s)exp_avg of parameter 0, \[10, 7\]: what rank 0 had of it on .*, loaded on rank 1 of"
        with pytest.raises(meshc.StateError, match=words) as error:
            pair.optimizers[0].load_state_dict(found)
        assert "program.state_dict(full=True)" in str(error.value)
    else:
        with pytest.raises(meshc.PeerError, match="exp_avg of parameter 0"):
            pair.optimizers[0].load_state_dict(found)
            while True:
                pair.train()


CHECKS: tuple[Callable[[Any], None], ...] = (
    edited, edited_beside_a_step, averages_before, looked_at, numbers, numbers_of_wholes, saved_by_each, saved_by_any, saved_whole,
    saved_by_rank_0,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
