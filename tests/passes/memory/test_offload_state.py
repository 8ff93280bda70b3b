"""Optimizer state on the host: it comes for its update and goes back; the numbers are those of the step without."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.ir import record, spmd
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt
from tests.passes.stepped import around, changed


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def around_without_numbers(name: str, step: meshc.TrainStep, line: str = "offload state", **ask: Tensor) -> str:
    return re.sub(r"number_0_\w+, ", "", changed(*around(name, step, "dp=2", line, **ask)))


def test_state_is_fetched_for_its_update_and_put_back_in_its_place() -> None:
    model = nn.Linear(4, 3, bias=False)
    step = meshc.TrainStep(model, optimizer=momentum(model), loss=F.mse_loss)
    ask = {"input": torch.zeros(4, 4), "target": torch.zeros(4, 3)}
    assert_expected_inline(around_without_numbers("offload_state", step, **ask), """\
- weight_momentum_buffer: "f32[weight.0 3, weight.1 4]" = "state:weight/momentum_buffer",
+ weight_momentum_buffer: "f32[weight.0 3, weight.1 4] host" = "state:weight/momentum_buffer",
- sgd_default: "(f32[3, 4], f32[3, 4], f32[])" = meshc.sgd(weight, t_default_3, weight_momentum_buffer, weight_meshc_first, False, False)
+ from_host: "f32[weight.0 3, weight.1 4]" = from_host(weight_momentum_buffer)
+ sgd_default: "(f32[3, 4], f32[3, 4], f32[])" = meshc.sgd(weight, t_default_3, from_host, weight_meshc_first, False, False)
+ to_host: "f32[weight.0 3, weight.1 4] host" = to_host(getitem_1, weight_momentum_buffer)
- "state:weight/momentum_buffer": getitem_1,
+ "state:weight/momentum_buffer": to_host,
""")
    assert_expected_inline(around_without_numbers("fuse_updates", step, **ask), """\
- sgd_default: "(f32[3, 4], f32[3, 4], f32[])" = meshc.sgd(weight, t_default_3, from_host, weight_meshc_first, False, False)
- getitem: "f32[weight.0 3, weight.1 4]" = getitem(sgd_default, 0)
- getitem_1: "f32[weight.0 3, weight.1 4]" = getitem(sgd_default, 1)
- getitem_2: "f32[] whole" = getitem(sgd_default, 2)
- to_host: "f32[weight.0 3, weight.1 4] host" = to_host(getitem_1, weight_momentum_buffer)
+ sgd_many__default: "int" = meshc.sgd_many_([weight], [t_default_3], [from_host], [weight_meshc_first], False, False)
+ to_host: "f32[weight.0 3, weight.1 4] host" = to_host(from_host, weight_momentum_buffer)
- "parameter:weight": getitem,
+ "parameter:weight": weight,
- "state:weight/meshc.first": getitem_2,
+ "state:weight/meshc.first": weight_meshc_first,
""")


def test_lines_name_parameters_and_those_about_no_state_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    x, target = torch.zeros(4, 4), torch.zeros(4, 3)

    def compiled(plan: str, optimizer: torch.optim.Optimizer) -> meshc.Program:
        step = meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss)
        return meshc.compile(step, meshc.Mesh("dp=2"), args=(x,), kwargs={"target": target}, plan=plan)

    program = compiled("offload state 1.*", torch.optim.AdamW(model.parameters()))
    there = {port.name for port in program.compiled.inputs if port.storage == "host"}
    assert there == {f"1.{name}/{slot}" for name in ("weight", "bias") for slot in ("exp_avg", "exp_avg_sq")}
    assert there == {port.name for port in program.compiled.outputs if port.storage == "host"}
    with pytest.raises(PlanError, match=r"`offload state 2\.\*`: no parameter of this name has optimizer state; 0\.weight has some"):
        compiled("offload state 2.*", torch.optim.AdamW(model.parameters()))
    with pytest.raises(PlanError, match="`offload state`: the optimizer keeps no state that could lie on the host"):
        compiled("offload state", torch.optim.SGD(model.parameters(), lr=0.1))


def test_outside_a_training_step_the_line_changes_nothing() -> None:
    model = nn.Linear(4, 3)
    ask = {"args": (torch.zeros(4, 4),)}
    plain, said = (str(meshc.compile(model, meshc.Mesh("dp=2"), plan=f"dp: batch{line}", **ask)) for line in ("", "\noffload state"))
    assert plain[plain.index("def forward") :] == said[said.index("def forward") :]


def step_of(case: Case, mesh: str, plan: str | None, microbatches: int = 1, backend: str = "eager") -> meshc.Program:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0.01)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    options = meshc.Options(pipeline=meshc.Pipelining(schedule="1f1b" if "pp" in mesh else None))
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, options=options, backend=backend)


def small() -> Case:
    return nanogpt(torch.float64, layers=1)


@pytest.mark.parametrize(
    "make, mesh, microbatches",
    [
        (small, "dp_shard=2,tp=2", 1), broad(nanogpt, "pp=2", 2), broad(llama, "dp=2,tp=2", 2), broad(gpt2, "dp_shard=2,tp=2", 2),
        broad(llama, "pp=2,dp=2", 4),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_a_step_means_what_it_means(make: Callable[[], Case], mesh: str, microbatches: int) -> None:
    """Parameters and state after each of three steps in double precision; and that all state but counts is there."""
    program = step_of(make(), mesh, "offload state", microbatches)
    kinds = {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert {"parameter after step 2", "state exp_avg after step 2"} <= kinds
    compiled = program.compiled
    assert all((port.storage == "host") == bool(port.shape) for port in compiled.inputs if port.kind == "state")
    plain = step_of(make(), mesh, None, microbatches).compiled
    for found, whole in zip(peak_memory.by_rank(compiled), peak_memory.by_rank(plain), strict=True):
        moved = sum(whole.kept[kind] - found.kept[kind] for kind in ("state", "copy"))  # a copy in the layout of torch too
        assert found.host == moved > 0 and found.total <= whole.total


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("backend", ["eager", broad("inductor")])
def test_state_comes_in_windows_of_which_the_next_is_on_its_way_while_one_is_updated(backend: str) -> None:
    """Twelve layers of 1 MiB, their state 24 MiB: windows of an eighth of that, one of two layers would be more."""
    model = Deep()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    ask = {"args": (torch.zeros(4, 512),), "kwargs": {"target": torch.zeros(4, 512)}}
    one, plain = (meshc.compile(step, meshc.Mesh("dp=2"), plan=plan, backend=backend, **ask) for plan in ("offload state", None))
    (stage,) = one.compiled.stages.values()
    order = [node for node in stage.graph.nodes if spmd.is_host_copy(node.target) or "adam_many" in str(node.target)]
    letters = "".join({spmd.from_host: "f", spmd.to_host: "t"}.get(node.target, "U") for node in order)
    # six layers' gradients in a bucket: the next window is on its way while one is updated, but for the last
    assert letters == "ffff" + "Uttff" * 10 + "UttUtt"
    assert all(record(node).phase == "update" for node in order)
    held, whole = peak_memory.peak_rank(one.compiled), peak_memory.peak_rank(plain.compiled)
    mebi = 1024 * 1024
    assert held.host == 24 * mebi and held.kept["state"] == 12 * 4
    there = 2 * 2 * mebi + 3 * mebi  # two windows, and what is on its way back: an eighth of all at most
    gradients = whole.peak.gradients - held.peak.gradients  # in regions all of them are there, where nothing is fetched in between
    assert whole.total - held.total - gradients == pytest.approx(24 * mebi - there, rel=0.01)
