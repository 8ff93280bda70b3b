"""One compilation for all ranks: who takes rank 0's program, who compiles for itself and says so, who is refused. Each function is one
check."""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshc
from meshc import program_cache
from meshc.runtime.failure.failed_rank import world_board
from tests.cache_name import CACHE
from tests.models import llama, mlp
from tests.processes.module_mode import gradients
from tests.processes.reference import close, furthest, sgd, train
from tests.processes.session import run_checks


def compiled(what: Any, mesh: Any, kwargs: dict[str, Any], **options: Any) -> tuple[meshc.Program, list[str]]:
    """The program, and what was said of who compiles for itself."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = meshc.compile(what, mesh, kwargs=kwargs, **options)
    return program, [str(one.message) for one in said if "compiles this program for itself" in str(one.message)]


def traced_here(program: meshc.Program) -> bool:
    return program.compilations.last.made.lowered is not None


def taken(mesh: Any) -> None:
    """A stock model's step, an evaluation of it, and a function: rank 1 traces nothing, steps as plain PyTorch does, saves and looks the
    same; and looks inside by a compilation of its own."""
    rank = dist.get_rank()
    case = llama(torch.float64, layers=1)
    start = copy.deepcopy(case.model)
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss)
    wanted, _, _ = train(start, case.loss_of, case.kwargs, sgd, clip=None)
    program, said = compiled(step, mesh, case.call_kwargs)
    assert said == [], said
    assert traced_here(program) == (rank == 0) and "differentiate" in program.timings
    close([program(**case.call_kwargs).item() for _ in wanted], wanted, 1e-6)  # norms and rotary tables are float32
    with torch.no_grad():
        second, said = compiled(case.model, mesh, {"input_ids": case.kwargs["input_ids"], "use_cache": True})
        assert said == [], said
        assert traced_here(second) == (rank == 0)
        output = second(input_ids=case.kwargs["input_ids"], use_cache=True)
    assert type(output) is type(start(**case.kwargs)) and output[CACHE].get_seq_length() == case.kwargs["input_ids"].shape[1]
    assert "vocab" in program.factors() and str(program) == program.world.from_rank_0(lambda: str(program))
    assert program.lowered.request.optimizer is program.compilations.spec


def searched(mesh: Any) -> None:
    """Rank 0 alone solves; what it has found is one text on all ranks, by which they step as plain PyTorch does."""
    case = mlp(torch.float64)
    start = copy.deepcopy(case.model)
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss)
    wanted, _, _ = train(start, case.loss_of, case.kwargs, sgd, clip=None)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() > 0:
            patch.setattr("meshc.passes.driver.choose.PlanSearch", None)
        program, said = compiled(step, mesh, case.call_kwargs, plan="auto")
    assert said == [] and traced_here(program) == (dist.get_rank() == 0)
    assert "auto" not in str(program.plan) and str(program.plan) == program.world.from_rank_0(lambda: str(program.plan))
    close([program(**case.call_kwargs).item() for _ in wanted], wanted, 1e-9)


class Kept(NamedTuple):
    hidden: Tensor
    layers: int


class Structured(nn.Module):
    """What it returns is no tensor alone; `tag` is read by nobody's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.tag = "all"
        self.scale = 2.0

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"kept": Kept(self.linear(x) * self.scale, 3), "none": None, "words": ["a", (1.5, x.dim())]}


def same(program: meshc.Program, twin: nn.Module, x: Tensor) -> None:
    ours, theirs = program(x=x), twin(x=x)
    assert torch.allclose(ours["kept"].hidden, theirs["kept"].hidden, atol=1e-12)
    assert type(ours["kept"]) is Kept and ours["kept"].layers == 3 and ours["words"] == theirs["words"] and ours["none"] is None


@torch.no_grad()
def structures(mesh: Any) -> None:
    """Named tuples, None, numbers and texts in an output: built from rank 0's description."""
    torch.manual_seed(0)
    model, x = Structured(), torch.randn(4, 8, dtype=torch.float64)
    twin = copy.deepcopy(model)
    program, said = compiled(model, mesh, {"x": x})
    assert said == [], said
    assert traced_here(program) == (dist.get_rank() == 0)
    same(program, twin, x)


@torch.no_grad()
def unread(mesh: Any) -> None:
    """Rank 1 differs in what no forward reads: it takes rank 0's program all the same."""
    torch.manual_seed(0)
    model, x = Structured(), torch.randn(4, 8, dtype=torch.float64)
    twin = copy.deepcopy(model)
    model.tag = f"rank {dist.get_rank()}"
    model.rows = iter([dist.get_rank()])
    program, said = compiled(model, mesh, {"x": x})
    assert said == [] and traced_here(program) == (dist.get_rank() == 0)
    same(program, twin, x)


class ReadsItsRank(Structured):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return super().forward(x + 0 if self.rank < 0 else x)


@torch.no_grad()
def read_alike(mesh: Any) -> None:
    """Rank 1 differs in what forward reads, and not in the program: it says so and compiles for itself, and the run goes on."""
    torch.manual_seed(0)
    model, x = ReadsItsRank(), torch.randn(4, 8, dtype=torch.float64)
    model.rank = dist.get_rank()
    twin = copy.deepcopy(model)
    program, said = compiled(model, mesh, {"x": x})
    assert traced_here(program)
    if dist.get_rank() == 1:
        assert len(said) == 1 and "does not take rank 0's: model.rank: 1 here, and 0 there\n" in said[0], said
    same(program, twin, x)


class AsksForItsRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if dist.get_rank() >= 0 else 3)


@torch.no_grad()
def asks(mesh: Any) -> None:
    """A forward that asks for its rank is traced on each: here it makes no difference, which only that can show."""
    model, x = AsksForItsRank(), torch.randn(4, 8, dtype=torch.float64)
    program, said = compiled(model, mesh, {"x": x})
    assert traced_here(program)
    if dist.get_rank() == 0:
        assert len(said) == 1 and "AsksForItsRank.forward (shared.py:" in said[0] and "reads get_rank" in said[0]
    assert program(x=x).shape == x.shape


@torch.library.custom_op("meshctest::doubled_of_a_rank", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class WithOwnOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return doubled(self.linear(x))


@torch.no_grad()
def own_operator(mesh: Any) -> None:
    """An operator of the user's own is named, and found among those that rank 1 has."""
    torch.manual_seed(0)
    model, x = WithOwnOperator(), torch.randn(4, 8, dtype=torch.float64)
    twin = copy.deepcopy(model)
    meshc.register_rule("meshctest::doubled_of_a_rank", "... -> ...")
    program, said = compiled(model, mesh, {"x": x})
    assert said == [], said
    assert traced_here(program) == (dist.get_rank() == 0)
    assert torch.allclose(program(x=x), twin(x), atol=1e-12)


def kept_on_disk(mesh: Any) -> None:
    """A second start of a step and of a module: rank 0 takes its program from disk, and the others rank 0's; they do what they did."""
    with tempfile.TemporaryDirectory() as place:
        options = meshc.Options(cache=place)
        for start in range(2):
            case = mlp(torch.float64)
            twin = copy.deepcopy(case.model)
            step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss)
            wanted, _, _ = train(twin, case.loss_of, case.kwargs, sgd, clip=None)
            program, said = compiled(step, mesh, case.call_kwargs, options=options)
            assert said == [] and traced_here(program) == (start == 0 and dist.get_rank() == 0)
            assert ("taken from disk" in program.timings) == (start == 1)
            close([program(**case.call_kwargs).item() for _ in wanted], wanted, 1e-9)
            module = mlp(torch.float64)
            plain = copy.deepcopy(module.model)
            called, said = compiled(module.model, mesh, module.kwargs, options=options)
            assert said == [] and traced_here(called) == (start == 0 and dist.get_rank() == 0)
            module.loss_of(called(**module.kwargs)).backward()
            module.loss_of(plain(**module.kwargs)).backward()
            assert furthest(gradients(module.model), gradients(plain))[0] < 1e-9
            dist.barrier()
        assert program_cache.size(Path(place)).programs == (2 if dist.get_rank() == 0 else 0)


def fails(mesh: Any) -> None:
    """What rank 0 cannot compile, all refuse with its error, and the run goes on."""

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(meshc.CaptureError, match="Data-dependent") as caught:
        meshc.compile(Branches(), mesh, kwargs={"x": torch.ones(4, 8)})
    assert "shared.py" in str(caught.value)


@torch.no_grad()
def another_program(mesh: Any) -> None:
    """What rank 1's forward reads makes another program of it: refused, with the places and both values, on both. It ends the run."""
    torch.manual_seed(0)
    model = Structured()
    if dist.get_rank() == 1:
        model.scale = 3.0
        model.linear.register_forward_hook(lambda module, inputs, output: output * 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(meshc.StateError if dist.get_rank() == 1 else meshc.PeerError, match="the compiled program") as caught:
            meshc.compile(model, mesh, kwargs={"x": torch.randn(4, 8, dtype=torch.float64)})
    begin = time.monotonic()
    while not world_board().has_failure and time.monotonic() < begin + 20:
        time.sleep(0.05)
    assert world_board().has_failure
    behind = next(line for line in str(caught.value).splitlines() if "what the model's code reads" in line)
    this, other = behind.partition(", rank ")[::2] if dist.get_rank() == 1 else behind.partition(", rank ")[::-2]
    assert "model.scale: 3.0" in this and "model.linear._forward_hooks: 1 hooks" in this, behind
    assert "model.scale: 2.0" in other and "model.linear._forward_hooks: 0 hooks" in other, behind
    assert dist.get_rank() == 0 or any("model.scale: 3.0 here, and 2.0 there" in str(one.message) for one in said)


CHECKS: tuple[Callable[[Any], None], ...] = (
    taken, searched, structures, unread, read_alike, asks, own_operator, kept_on_disk, fails, another_program,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
