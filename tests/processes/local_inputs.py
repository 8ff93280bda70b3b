"""inputs="local": each rank passes its part of the batch; each function is one check."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshc
from tests.frontend.test_stock_trainer import trainer
from tests.models import bert, gpt2, mlp, nanogpt, resnet
from tests.processes.module_mode import gradients
from tests.processes.reference import SEED, close, furthest, sgd, train
from tests.processes.session import run_checks

OPTIONS = meshc.Options(seed=SEED)


def part(tensor: Tensor, mesh: Any) -> Tensor:
    """This rank's rows: along dp, whole along the other axes."""
    return tensor.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].clone()


def parts(kwargs: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    return {name: part(value, mesh) for name, value in kwargs.items()}


def unequal_labels(mesh: Any) -> None:
    """Masked tokens differ in number between the ranks; the loss is the mean over all of them, dropout that of the whole batch."""
    case = bert(torch.float64, batch=4, layers=1)
    case.kwargs["labels"][0] = -100
    start = copy.deepcopy(case.model)
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters())), mesh, inputs="local", options=OPTIONS)
    ours = [program(**parts(case.kwargs, mesh)).item() for _ in range(2)]
    wanted, _, _ = train(start, case.loss_of, case.kwargs, sgd, clip=None)
    close(ours, wanted, 1e-10)


def dynamic_sizes(mesh: Any) -> None:
    """Parts of several sizes, equal on all ranks at each call, by one compilation; sizes are those of the whole batch."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    theirs = sgd(twin.parameters())
    options = meshc.Options(seed=SEED, dynamic={name: {0: torch.export.Dim("batch", max=8)} for name in case.call_kwargs})
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss)
    program = meshc.compile(step, mesh, inputs="local", options=options)
    ours, wanted = [], []
    for rows in (4, 6, 2, 10, 4):
        inputs = {name: torch.cat([value, value])[:rows].clone() for name, value in case.call_kwargs.items()}
        if rows > 8:
            with pytest.raises(meshc.InputError, match="batch is 10 .*the program serves batch from 2 to 8"):
                program(**parts(inputs, mesh))
            continue
        ours.append(program(**parts(inputs, mesh)).item())
        loss = F.cross_entropy(twin(inputs["x"]), inputs["target"])
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        wanted.append(loss.item())
    close(ours, wanted, 1e-10)
    assert len(program.compilations.general) == 1


def batch_norm(mesh: Any) -> None:
    case = resnet(torch.float64)
    start = copy.deepcopy(case.model)
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss), mesh, inputs="local")
    ours = [program(**parts(case.call_kwargs, mesh)).item() for _ in range(2)]
    wanted, twin, _ = train(start, case.loss_of, case.kwargs, sgd, clip=None)
    close(ours, wanted, 1e-10)
    state = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert furthest(state["model"], twin.state_dict())[0] < 1e-9


def microbatches(mesh: Any) -> None:
    """Each microbatch is a step of its own: two rows of each rank's part."""
    case = resnet(torch.float64)
    twin = copy.deepcopy(case.model)
    optimizer = sgd(case.model.parameters())
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, microbatches=2, batch_mix="mean_of_parts")
    program = meshc.compile(step, mesh, inputs="local")
    mine = parts(case.call_kwargs, mesh)
    wanted = []
    for rows in (torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])):
        wanted.append(F.cross_entropy(twin(case.kwargs["images"][rows]), case.target_kwargs["target"][rows]).item() / 2)
    close([program(**mine).item()], [sum(wanted)], 1e-10)
    assert torch.allclose(case.model.get_buffer("bn.running_mean"), twin.get_buffer("bn.running_mean"), atol=1e-12)


def local_mean(mesh: Any) -> None:
    """Module mode: logits come back as this rank's rows; backward from a local mean is what DDP does."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    mine = parts(case.call_kwargs, mesh)
    options = meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))
    program = meshc.compile(case.model, mesh, kwargs={"x": mine["x"]}, inputs="local", options=options)
    logits = program(x=mine["x"])
    wanted = twin(**case.kwargs)
    assert torch.allclose(logits, part(wanted, mesh), atol=1e-12)
    case.loss(logits, mine["target"]).backward()
    case.loss_of(wanted).backward()
    assert furthest(gradients(case.model), gradients(twin))[0] < 1e-9


def local_loss_unsaid(mesh: Any) -> None:
    """Without local_loss such a backward raises, and says what to write."""
    case = mlp(torch.float64)
    x = part(case.kwargs["x"], mesh)
    program = meshc.compile(case.model, mesh, kwargs={"x": x}, inputs="local")
    loss = program(x=x).sum()
    with pytest.raises(meshc.StateError, match=r'LocalInputs\(loss="mean"\)'):
        loss.backward()


def another_shape(mesh: Any) -> None:
    """A last batch that is smaller on rank 1: both shapes and the advice. Last, since a refusal stops all ranks."""
    case = mlp(torch.float64)
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss), mesh, inputs="local")
    mine = parts(case.call_kwargs, mesh)
    program(**mine)
    if mesh["dp"].get_local_rank() == 1:
        mine = {name: value[:-1] for name, value in mine.items()}
    with pytest.raises(meshc.InputError if mesh["dp"].get_local_rank() == 1 else meshc.PeerError) as raised:
        program(**mine)
    text = str(raised.value)
    assert "x float64 [2, 24]" in text and "x float64 [3, 24]" in text and "uneven_rows=True" in text, text


def short_batches(mesh: Any) -> None:
    """Parts of several sizes, the same on all ranks at each call, each size a program; a size that one rank alone has is refused by all
    before anything runs, and all go on."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    theirs = sgd(twin.parameters())
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss)
    program = meshc.compile(step, mesh, inputs="local", options=meshc.Options(seed=SEED, debugging=meshc.Debugging(kept_sizes=2)))
    ours, wanted = [], []
    for rows in (6, 4, 6, 2, 4):
        inputs = {name: value[:rows].clone() for name, value in case.call_kwargs.items()}
        ours.append(program(**parts(inputs, mesh)).item())
        wanted.append(one_step(twin, theirs, inputs))
    close(ours, wanted, 1e-10)
    assert len(program.compilations.kept) == len(program.compilations.general) == 2
    mine = {name: value[: 2 + mesh["dp"].get_local_rank()] for name, value in case.call_kwargs.items()}
    with pytest.raises(meshc.InputError, match="data rank 0 has 2 rows, that of data rank 1 3.*\n.*uneven_rows=True"):
        program(**mine)
    close([program(**parts(inputs, mesh)).item()], [one_step(twin, theirs, inputs)], 1e-10)


def one_step(twin: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> float:
    loss = F.cross_entropy(twin(inputs["x"]), inputs["target"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def an_epoch(mesh: Any) -> None:
    """Two epochs of a DataLoader with torch's own sampler, batches loaded ahead, the last one short: what plain PyTorch makes of the same
    rows; and of the same batches on every rank, of which the last has one row."""
    torch.manual_seed(3)
    place, ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
    data = TensorDataset(torch.randn(13, 24, dtype=torch.float64), torch.randint(10, (13,)))
    samplers = [DistributedSampler(data, ranks, rank, seed=5) for rank in range(ranks)]
    for inputs in ("local", "global"):
        case = mlp(torch.float64)
        twin = copy.deepcopy(case.model)
        theirs = sgd(twin.parameters())
        program = meshc.compile(meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss), mesh, inputs=inputs)
        ours, wanted = [], []
        for epoch in range(2):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            all_parts = [DataLoader(data, 3, sampler=sampler) for sampler in samplers]
            whole = DataLoader(data, 6)
            for x, y in meshc.prefetch(all_parts[place] if inputs == "local" else whole, program):
                ours.append(program(x=x, target=y).item())
            batches = zip(*all_parts, strict=True) if inputs == "local" else ((batch,) for batch in whole)
            for batch in batches:
                rows = {name: torch.cat(values) for name, values in zip(("x", "target"), zip(*batch, strict=True), strict=True)}
                wanted.append(one_step(twin, theirs, rows))
        close(ours, wanted, 1e-10)
        assert len(ours) == 6


def many_lengths(mesh: Any) -> None:
    """Lengths of sequences, each a size of its own, some from a trace that they share: what one device makes of them."""
    case = nanogpt(torch.float64, batch=4, layers=1)
    twin = copy.deepcopy(case.model)
    theirs = sgd(twin.parameters())
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss)
    program = meshc.compile(step, mesh, options=meshc.Options(seed=SEED, debugging=meshc.Debugging(kept_sizes=3)))
    ours, wanted = [], []
    for rows, length in ((4, 12), (4, 7), (4, 10), (4, 5), (4, 12), (3, 10), (1, 9)):
        batch = {name: value[:rows, :length].clone() for name, value in case.call_kwargs.items()}
        ours.append(program(**batch).item())
        loss = case.loss_of(twin(**batch))
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        wanted.append(loss.item())
    close(ours, wanted, 1e-10)
    assert len(program.compilations.kept) == 3


UNEVEN = ((3, 3), (4, 1), (0, 5), (1, 0), (2, 4), (5, 0))
"""Rows of two data ranks, call by call."""


def uneven_part(tensor: Tensor, counts: tuple[int, ...], mesh: Any) -> Tensor:
    return tensor[: sum(counts)].split(list(counts))[mesh["dp"].get_local_rank()].clone()


def uneven_lengths(mesh: Any) -> None:
    """Parts of any numbers of rows, none too, whose sequences are of another length at each call: what one device makes of all rows."""
    case = nanogpt(torch.float64, batch=5, layers=1)
    twin = copy.deepcopy(case.model).eval()  # draws of a part are the whole batch's, which a plain model has not
    theirs = sgd(twin.parameters())
    step = meshc.TrainStep(case.model.eval(), optimizer=sgd(case.model.parameters()), loss=case.loss)
    program = meshc.compile(
        step,
        mesh,
        inputs="local",
        options=meshc.Options(local_inputs=meshc.LocalInputs(uneven_rows=True), debugging=meshc.Debugging(kept_sizes=2)),
    )
    for counts, length in (((3, 2), 12), ((0, 4), 7), ((1, 0), 5), ((4, 1), 12)):
        batch = {name: value[: sum(counts), :length].clone() for name, value in case.call_kwargs.items()}
        ours = program(**{name: uneven_part(value, counts, mesh) for name, value in batch.items()}).item()
        loss = case.loss_of(twin(**batch))
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        close([ours], [loss.item()], 1e-10)
    assert len(program.compilations.kept) == 2


def uneven_steps(mesh: Any) -> None:
    """Parts of any numbers of rows: losses, updated parameters and metrics are those of the rows of all ranks on one device."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    theirs = sgd(twin.parameters())

    def loss_of(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(output, target), {"chosen": output.argmax(1)}

    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=loss_of)
    program = meshc.compile(step, mesh, inputs="local", options=meshc.Options(seed=SEED, local_inputs=meshc.LocalInputs(uneven_rows=True)))
    ours, wanted = [], []
    for counts in UNEVEN:
        whole = {name: value[: sum(counts)].clone() for name, value in case.call_kwargs.items()}
        chosen = twin(whole["x"]).argmax(1)
        ours.append(program(**{name: uneven_part(value, counts, mesh) for name, value in whole.items()}).item())
        assert torch.equal(program.metrics["chosen"], uneven_part(chosen, counts, mesh))
        wanted.append(one_step(twin, theirs, whole))
    close(ours, wanted, 1e-10)
    state = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert furthest(state["model"], twin.state_dict())[0] < 1e-9
    nothing = {name: value[:0] for name, value in whole.items()}
    with pytest.raises(meshc.InputError, match="no rank has a row"):
        program(**nothing)
    assert len(program.compilations.kept) == 3  # 6, 5 and 1 rows


def uneven_module(mesh: Any) -> None:
    """Module mode: outputs are the rank's own rows, gradients of inputs too; backward of a sum is that of the sum over all rows."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    x = case.kwargs["x"]
    options = meshc.Options(local_inputs=meshc.LocalInputs(loss="sum", uneven_rows=True))
    mine = uneven_part(x, UNEVEN[0], mesh).requires_grad_()
    program = meshc.compile(case.model, mesh, kwargs={"x": mine}, inputs="local", options=options)
    for counts in UNEVEN:
        mine, whole = uneven_part(x, counts, mesh).requires_grad_(), x[: sum(counts)].clone().requires_grad_()
        logits, wanted = program(x=mine), twin(x=whole)
        assert logits.shape[0] == counts[mesh["dp"].get_local_rank()]
        assert torch.allclose(logits, uneven_part(wanted, counts, mesh), atol=1e-12)
        (logits**2).sum().backward()
        (wanted**2).sum().backward()
        assert mine.grad is not None and whole.grad is not None
        assert torch.allclose(mine.grad, uneven_part(whole.grad, counts, mesh), atol=1e-12)
        assert furthest(gradients(case.model), gradients(twin))[0] < 1e-9
    with torch.no_grad():
        assert torch.allclose(program(x=mine.detach()), uneven_part(twin(x=whole), counts, mesh), atol=1e-12)


def unlike_parts(mesh: Any) -> None:
    """Parts that differ in more than rows: both are shown, by all ranks, which go on."""
    case = mlp(torch.float64)
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss)
    program = meshc.compile(step, mesh, inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(uneven_rows=True)))
    mine = parts(case.call_kwargs, mesh)
    program(**mine)
    with pytest.raises(meshc.InputError) as raised:
        program(x=mine["x"], target=mine["target"].to(torch.int32 if dist.get_rank() == 1 else torch.int64))
    assert "target int32 [0]" in str(raised.value) and "target int64 [0]" in str(raised.value), raised.value
    program(**mine)


def counts_of_a_trainer(mesh: Any) -> None:
    """GPT-2's class name does not say that it shifts its labels, so the Trainer counts the first ones too: on one device its loss is 11/12
    of the mean. Parts of a batch, and all of it on every rank, are counted by the Trainer once and twice."""
    case = gpt2(torch.float64, batch=4, layers=1)
    ids, twin = case.kwargs["input_ids"], case.model.eval()
    whole = {"input_ids": ids, "labels": ids}
    wanted = twin(**whole, num_items_in_batch=torch.tensor(48.0)).loss
    wanted.backward()
    assert abs(wanted.item() - twin(**whole).loss.item() * 11 / 12) < 1e-6
    for inputs, mine, times in (("local", parts(whole, mesh), 1), ("global", whole, 2)):
        model = copy.deepcopy(twin)
        model.zero_grad()
        meshc.compile(model, mesh, kwargs=mine, inputs=inputs)
        output = trainer(processes=2).compute_loss(model, {**mine, "num_items_in_batch": torch.tensor(48.0 * times)})
        loss = output["loss"] * 2  # as the Trainer does
        loss.backward()
        close([loss.item()], [wanted.item()], 1e-6)
        assert furthest(gradients(model), gradients(twin))[0] < 1e-6


def same_rows(mesh: Any) -> None:
    """Of a loader that does not know of ranks: said at its second batch, once, at the line of the loop; not where a batch is passed again
    and again, or is dealt out, or in evaluation."""
    case = mlp(torch.float64)
    x = part(case.kwargs["x"], mesh)
    first = case.kwargs["x"][: len(x)]
    for batches, many in (([first, first + 1, first + 2], 1), ([first] * 4, 0), ([x, x + 1, first], 0)):
        model = copy.deepcopy(case.model)
        meshc.compile(model, mesh, args=(first,), inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for batch in batches:
                model(batch).square().mean().backward()
            with torch.no_grad():
                model(first), model(first + 3)
        told = [one for one in seen if "have passed the same inputs" in str(one.message)]
        assert len(told) == many and all(one.filename == __file__ for one in told), [str(one.message) for one in seen]
        assert all("num_replicas=2, rank=mesh[\"dp\"].get_local_rank()" in str(one.message) for one in told)


class Recurrent(nn.Module):
    """[steps, rows] as torch's recurrent layers take them by default, with a state [layers, rows, features] in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, dtype=torch.float64)
        self.rnn = nn.LSTM(8, 8, 2, dtype=torch.float64)
        self.head = nn.Linear(8, 12, dtype=torch.float64)

    def forward(self, src: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, hidden = self.rnn(self.embed(src), hidden)
        return self.head(out), hidden


class Masked(nn.Module):
    """An encoder [steps, rows], as torch's Transformer is by default, with a mask [steps, steps] that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, dtype=torch.float64)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, dtype=torch.float64)
        self.head = nn.Linear(8, 12, dtype=torch.float64)

    def forward(self, src: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(src), src_mask=mask))
        return out


def columns(tensor: Tensor, dim: int, mesh: Any) -> Tensor:
    """This rank's part along another dim than the first."""
    return tensor.chunk(mesh["dp"].size(), dim)[mesh["dp"].get_local_rank()].clone()


def sequence_first(mesh: Any) -> None:
    """A recurrent model whose inputs are [steps, rows]: losses of steps and the states that it hands on are those of all rows on one
    device, with labels as they are and flattened; evaluation too."""
    torch.manual_seed(0)
    model = Recurrent()
    twin = copy.deepcopy(model)
    theirs = sgd(twin.parameters())

    def loss(output: tuple[Tensor, Any], target: Tensor) -> Tensor:
        return F.cross_entropy(output[0].flatten(0, 1), target.flatten())

    program = meshc.compile(meshc.TrainStep(model, optimizer=sgd(model.parameters()), loss=loss), mesh, inputs="local")
    hidden = (torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64))
    state = tuple(columns(one, 1, mesh) for one in hidden)
    for length in (5, 5, 3):
        src, target = torch.randint(12, (length, 4)), torch.randint(12, (length, 4))
        ours = program(src=columns(src, 1, mesh), hidden=state, target=columns(target, 1, mesh).flatten())
        wanted = loss(twin(src, hidden), target)
        close([ours.item()], [wanted.item()], 1e-10)
        theirs.zero_grad()
        wanted.backward()
        theirs.step()
    with torch.no_grad():
        logits, last = model(columns(src, 1, mesh), state)
        whole, end = twin(src, hidden)
    for one, other in ((logits, whole), *zip(last, end, strict=True)):
        assert torch.allclose(one, columns(other, 1, mesh), atol=1e-12)


def mask_without_rows(mesh: Any) -> None:
    """A transformer [steps, rows] whose mask has no rows: logits come back as this rank's rows, gradients are DDP's; masks that differ
    between ranks are refused by name, and all go on."""
    torch.manual_seed(0)
    model, src, target = Masked(), torch.randint(12, (5, 4)), torch.randint(12, (5, 4))
    twin, mask = copy.deepcopy(model), torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    mine, options = (
        columns(src, 1, mesh),
        meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"), debugging=meshc.Debugging(check_inputs=1)),
    )
    program = meshc.compile(model, mesh, args=(mine, mask), inputs="local", options=options)
    logits, wanted = program(mine, mask), twin(src, mask)
    assert torch.allclose(logits, columns(wanted, 1, mesh), atol=1e-12)
    F.cross_entropy(logits.flatten(0, 1), columns(target, 1, mesh).flatten()).backward()
    F.cross_entropy(wanted.flatten(0, 1), target.flatten()).backward()
    assert furthest(gradients(model), gradients(twin))[0] < 1e-9
    with pytest.raises(meshc.InputError, match="ranks 0 and 1 passed different mask, which has no dim of the batch"):
        program(mine, mask if mesh["dp"].get_local_rank() == 0 else torch.zeros_like(mask))
    assert torch.equal(program(mine, mask), logits)


def uneven_columns(mesh: Any) -> None:
    """Parts of different numbers of rows, along the dim that `names=` says, and refused with that line where it does not."""
    torch.manual_seed(0)
    model, options = Masked(), meshc.Options(local_inputs=meshc.LocalInputs(uneven_rows=True))
    twin, mask = copy.deepcopy(model), torch.zeros(5, 5, dtype=torch.float64)
    src, target = torch.randint(12, (5, 4)), torch.randint(12, (5, 4))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    names = {"src": ("seq", "batch"), "target": ("seq", "batch"), "mask": ("seq", "keys")}
    place = mesh["dp"].get_local_rank()
    mine = {name: value.split([3, 1], 1)[place].contiguous() for name, value in (("src", src), ("target", target))}
    step = meshc.TrainStep(model, optimizer=sgd(model.parameters()), loss=loss)
    program = meshc.compile(step, mesh, inputs="local", names=names, options=options)
    close([program(**mine, mask=mask).item()], [loss(twin(src, mask), target).item()], 1e-10)


CHECKS: tuple[Callable[[Any], None], ...] = (
    unequal_labels, dynamic_sizes, batch_norm, microbatches, local_mean, local_loss_unsaid, short_batches, an_epoch, many_lengths,
    uneven_steps, uneven_lengths, uneven_module, unlike_parts, another_shape, counts_of_a_trainer, same_rows,
    sequence_first, mask_without_rows, uneven_columns,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
