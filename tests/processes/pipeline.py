"""Pipelines on real ranks: state, checkpoints, further programs of one model; each function is one check."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshc
from meshc import artifact
from meshc.frontend.reference_random import ReferenceRandom
from tests.cache_name import CACHE
from tests.models import Case, NanoGPT, gpt2, nanogpt, resnet
from tests.processes.reference import SEED, adamw, close, furthest, sgd, train
from tests.processes.session import run_checks


class TwoEntries(nn.Module):
    """Embeds words, or takes them embedded; then neither `first` nor the table is used, but by the head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = x if x.is_floating_point() else F.gelu(self.first(self.table(x)))
        return self.head(F.gelu(self.third(F.gelu(self.second(h)))))


def options(**more: Any) -> meshc.Options:
    return meshc.Options(**{"seed": SEED, "schedule": "1f1b", **more})


def small() -> Case:
    """Two layers with dropout, the head tied to the embedding."""
    return nanogpt(torch.float64, batch=4, seq=6, hidden=16, dropout=0.1)


def program_of(case: Case, mesh: Any, microbatches: int = 2, **more: Any) -> meshc.Program:
    train_step = meshc.TrainStep(
        case.model, optimizer=adamw(case.model.parameters()), loss=case.loss, clip_grad_norm=0.5, microbatches=microbatches
    )
    return meshc.compile(train_step, mesh, options=options(**more))


def here(mesh: Any) -> int:
    return mesh["pp"].get_local_rank()


def scheduled(mesh: Any) -> None:
    """A scheduler, metrics that are those of all stages, counts of steps that are right on every rank, state dicts."""
    case = small()
    twin = copy.deepcopy(case.model)
    program = program_of(case, mesh)
    assert program.step is not None
    optimizer = program.step.optimizer
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    losses, norms = [], []
    for _ in range(2):
        losses.append(program(**case.call_kwargs).item())
        norms.append(float(program.metrics["grad_norm"]))
        rates.step()
    wanted, wanted_norms = [], []
    theirs = adamw(twin.parameters())
    for step in range(2):
        with ReferenceRandom(SEED, step):
            loss = case.loss_of(twin(**case.kwargs))
        loss.backward()
        wanted_norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), 0.5)))
        theirs.param_groups[0]["lr"] = 1e-2 / (1 + step)
        theirs.step()
        theirs.zero_grad()
        wanted.append(loss.item())
    close(losses, wanted, 1e-9)
    close(norms, wanted_norms, 1e-9)
    model, optim = get_state_dict(case.model, optimizer)
    assert all(float(slots["step"]) == 2 for slots in optim["state"].values())
    places = {value.device_mesh.mesh.tolist()[0] if value.device_mesh.ndim == 1 else str(value.device_mesh.mesh.tolist())
              for value in model.values() if isinstance(value, DTensor)}  # fmt: skip
    assert len(places) == mesh["pp"].size(), places
    state = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert furthest(state["model"], twin.state_dict())[0] < 1e-9
        named = {name: theirs.state[parameter] for name, parameter in twin.named_parameters()}
        for slot in ("exp_avg", "exp_avg_sq"):
            ours = {name: slots[slot] for name, slots in state["optim"]["state"].items()}
            assert furthest(ours, {name: slots[slot] for name, slots in named.items()})[0] < 1e-9
        assert {float(slots["step"]) for slots in state["optim"]["state"].values()} == {2.0}
    else:
        assert state == {}


def two_programs(mesh: Any) -> None:
    """Steps, and an inference program of the same model, whose own balanced cut is another: it delivers what lives elsewhere."""
    case = small()
    twin = copy.deepcopy(case.model)
    program = program_of(case, mesh, pp_splits=["h.1"])
    losses = [program(**case.call_kwargs).item()]
    ids = {"idx": case.kwargs["idx"]}
    with torch.no_grad():
        case.model.eval()
        inference = meshc.compile(case.model, mesh, kwargs=ids, options=options(schedule=None, pp_splits=["ln_f"]))
        found = inference(**ids)[0]
    pipeline = inference.compiled.pipeline
    assert pipeline is not None and any(":h.1." in move.key for move in pipeline.shared), pipeline.shared
    case.model.train()
    inference_of_trained = found
    losses.append(program(**case.call_kwargs).item())
    wanted, trained, _ = train(twin, case.loss_of, case.kwargs, steps=1, clip=0.5)
    with torch.no_grad():
        expected = trained.eval()(**ids)[0]
    whole = inference_of_trained.full_tensor() if isinstance(inference_of_trained, DTensor) else inference_of_trained
    assert float((whole - expected).abs().max()) < 1e-9
    more, _, _ = train(twin, case.loss_of, case.kwargs, steps=2, clip=0.5)
    assert len(wanted) == 1
    # the inference was a call of the model too, and took a number of the random draws
    assert abs(losses[0] - more[0]) < 1e-9


def two_programs_the_other_way(mesh: Any) -> None:
    """Inference first: its cut decides where parameters live, and with them the optimizer's state of the step that comes later."""
    case = small()
    twin = copy.deepcopy(case.model)
    ids = {"idx": case.kwargs["idx"]}
    with torch.no_grad():
        inference = meshc.compile(case.model.eval(), mesh, kwargs=ids, options=options(schedule=None, pp_splits=["ln_f"]))
        inference(**ids)
    case.model.train()
    program = program_of(case, mesh, pp_splits=["h.1"])
    losses = [program(**case.call_kwargs).item() for _ in range(3)]
    wanted, trained, theirs = train(twin, case.loss_of, case.kwargs, steps=3, clip=0.5, first=1)
    close(losses, wanted, 1e-9)
    state = program.state_dict()["optim"]["state"]["h.1.ln_1.weight"]["exp_avg"]
    assert isinstance(state, DTensor) and (state.to_local().numel() == 0) == (here(mesh) != 0), "it lives with its parameter"
    whole = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert furthest(whole["model"], trained.state_dict())[0] < 1e-9
        ours = {name: slots["exp_avg"] for name, slots in whole["optim"]["state"].items()}
        assert furthest(ours, {name: theirs.state[parameter]["exp_avg"] for name, parameter in trained.named_parameters()})[0] < 1e-9


def states_of_another_cut(mesh: Any) -> None:
    """A state dict of live tensors goes into a model whose stages are others, and into one without stages."""
    cases = [small() for _ in range(3)]
    flat = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    first = program_of(cases[0], mesh, pp_splits=["h.1"])
    first(**cases[0].call_kwargs)
    others = [program_of(cases[1], mesh, pp_splits=["ln_f"]), program_of(cases[2], flat, schedule=None)]
    for other in others:
        other(**cases[0].call_kwargs)
        for parameter in other.asked.module.parameters():
            parameter.data.zero_()
        other.load_state_dict(first.state_dict())
    wanted = [first(**cases[0].call_kwargs).item() for _ in range(2)]
    for other in others:
        close([other(**cases[0].call_kwargs).item() for _ in range(2)], wanted, 1e-9)


def from_meta(mesh: Any) -> None:
    """A model on `meta`, filled by init_weights; each rank holds its own stage."""
    case = nanogpt(torch.float64)
    twin = copy.deepcopy(case.model)
    with torch.device("meta"):
        model = NanoGPT(vocab=65, seq=12, hidden=32, layers=2, heads=4, dropout=0.0, tied=True).double()
    start = {name: value.clone() for name, value in twin.state_dict().items()}
    step = meshc.TrainStep(model, optimizer=adamw(model.parameters()), loss=case.loss, microbatches=2, clip_grad_norm=1.0)
    program = meshc.compile(step, mesh, kwargs=case.call_kwargs, options=options())
    with pytest.raises(meshc.StateError, match="was built on `meta`"):
        program(**case.call_kwargs)

    def fill(whole: nn.Module) -> None:
        whole.load_state_dict(start)

    program.init_weights(fill)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert held < sum(parameter.numel() for parameter in model.parameters())
    wanted, _, _ = train(twin, case.loss_of, case.kwargs, steps=2)
    close([program(**case.call_kwargs).item() for _ in range(2)], wanted, 1e-9)


def verified(mesh: Any) -> None:
    """meshc.verify under a process group."""
    case = small()
    program = program_of(case, mesh)
    program(**case.call_kwargs)
    report = meshc.verify(program, case.call_kwargs, dtype=torch.float64)
    assert report.ok, report


def dynamic_sizes(mesh: Any) -> None:
    case = small()
    twin = copy.deepcopy(case.model)
    sizes = {name: {1: torch.export.Dim("seq", max=16)} for name in case.call_kwargs}
    program = program_of(case, mesh, dynamic=sizes)
    ours = [program(**{name: value[:, :length].contiguous() for name, value in case.call_kwargs.items()}).item() for length in (6, 4, 6)]
    optimizer = adamw(twin.parameters())
    wanted = []
    for step, length in enumerate((6, 4, 6)):
        with ReferenceRandom(SEED, step):
            loss = case.loss_of(twin(**{name: value[:, :length].contiguous() for name, value in case.kwargs.items()}))
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    close(ours, wanted, 1e-9)
    assert len(program.compilations.general) == 1


def mean_of_parts(mesh: Any) -> None:
    """Batch norm, microbatch by microbatch; running means end up on all ranks."""
    case = resnet(torch.float64)
    twin = copy.deepcopy(case.model)
    step = meshc.TrainStep(
        case.model, optimizer=sgd(case.model.parameters()), loss=case.loss, microbatches=2, batch_mix="mean_of_parts"
    )
    program = meshc.compile(step, mesh, options=options())
    ours = [program(**case.call_kwargs).item() for _ in range(2)]
    theirs, wanted = sgd(twin.parameters()), []
    for _ in range(2):
        total = 0.0
        for rows in (slice(0, 4), slice(4, 8)):
            loss = F.cross_entropy(twin(case.kwargs["images"][rows]), case.target_kwargs["target"][rows]) / 2
            loss.backward()
            total += loss.item()
        theirs.step()
        theirs.zero_grad()
        wanted.append(total)
    close(ours, wanted, 1e-9)
    buffers = dict(twin.named_buffers())
    assert all(torch.allclose(value, buffers[name]) for name, value in case.model.named_buffers())
    state = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert furthest(state["model"], twin.state_dict())[0] < 1e-9


def as_they_lie(mesh: Any) -> None:
    """outputs="dtensor", and key-value caches, of an inference in stages."""
    case = gpt2(torch.float64, batch=4, seq=6, hidden=16)
    model = case.model.eval()
    ids = {"input_ids": case.kwargs["input_ids"]}
    with torch.no_grad():
        wanted = copy.deepcopy(model)(**ids, use_cache=True)
        program = meshc.compile(model, mesh, kwargs={**ids, "use_cache": True}, outputs="dtensor", options=options(schedule=None))
        found = program(**ids, use_cache=True)
    assert isinstance(found.logits, DTensor) == ("dp" in (mesh.mesh_dim_names or ()))
    found.logits = DTensor.full_tensor(found.logits) if isinstance(found.logits, DTensor) else found.logits
    assert float((found.logits - wanted.logits).abs().max()) < 1e-9
    for ours, theirs in zip(found[CACHE].layers, wanted[CACHE].layers, strict=True):
        assert isinstance(ours.keys, DTensor)
        assert float((ours.keys.full_tensor() - theirs.keys).abs().max()) < 1e-9


def local_inputs(mesh: Any) -> None:
    """Each rank of dp passes its part of the batch, all stages' ranks at one place of dp the same."""
    case = small()
    start = copy.deepcopy(case.model)
    step = meshc.TrainStep(case.model, optimizer=adamw(case.model.parameters()), loss=case.loss, clip_grad_norm=0.5, microbatches=2)
    program = meshc.compile(step, mesh, inputs="local", options=options())
    count, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    mine = {name: value.chunk(count)[place].clone() for name, value in case.call_kwargs.items()}
    ours = [program(**mine).item() for _ in range(2)]
    wanted, _, _ = train(start, case.loss_of, case.kwargs, clip=0.5)
    close(ours, wanted, 1e-9)


def saved_by_ranks(mesh: Any) -> None:
    """`program.save` gathers what the stages hold."""
    case = small()
    program = program_of(case, mesh)
    program(**case.call_kwargs)
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, 0)
    program.save(f"{box[0]}/p")
    whole = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert artifact.load(f"{box[0]}/p").pipeline == program.compiled.pipeline
        with artifact.open_weights(f"{box[0]}/p") as weights:
            assert all(torch.equal(weights.tensor(name), value) for name, value in whole["model"].items())
        shutil.rmtree(box[0])


def a_part_and_then_the_whole(mesh: Any) -> None:
    """The first program does not use all parameters; a step then updates all of them, a tied one under its other name."""
    torch.manual_seed(0)
    model = TwoEntries().double()
    twin = copy.deepcopy(model)
    hidden, words, wanted = torch.randn(4, 6, 8, dtype=torch.float64), torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    with torch.no_grad():
        program = meshc.compile(model, mesh, kwargs={"x": hidden}, options=options(schedule=None))
        assert float((program(x=hidden) - twin(hidden)).abs().max()) < 1e-12
    step = meshc.TrainStep(model, optimizer=adamw(model.parameters()), loss=word_loss, microbatches=2, clip_grad_norm=1.0)
    program = meshc.compile(step, mesh, options=options())
    losses = [program(words, target=wanted).item() for _ in range(3)]
    expected, trained, _ = train(twin, lambda output: word_loss(output, wanted), {"x": words}, steps=3)
    close(losses, expected, 1e-9)
    whole = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert furthest(whole["model"], trained.state_dict())[0] < 1e-9


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def inductor(mesh: Any) -> None:
    """Compiled regions, stage by stage."""
    torch.manual_seed(0)
    model = TwoEntries().double()
    twin = copy.deepcopy(model)
    words, wanted = torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    step = meshc.TrainStep(model, optimizer=adamw(model.parameters()), loss=word_loss, microbatches=2, clip_grad_norm=1.0)
    program = meshc.compile(step, mesh, backend="inductor", options=options())
    losses = [program(words, target=wanted).item() for _ in range(2)]
    expected, _, _ = train(twin, lambda output: word_loss(output, wanted), {"x": words}, steps=2)
    close(losses, expected, 1e-9)


CHECKS: tuple[Callable[[Any], None], ...] = (
    scheduled, two_programs, two_programs_the_other_way, states_of_another_cut,
    from_meta, verified, dynamic_sizes, mean_of_parts, as_they_lie, local_inputs,
    saved_by_ranks, a_part_and_then_the_whole, inductor,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
