"""Updates on the host: gradients go out as they are made, state stays there, parameters come back; the numbers are one device's."""
# ruff: noqa: E501 - lines of programs are as long as they are

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc.cost import peak_memory
from meshc.ir import record, runs_on_host, spmd
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt
from tests.passes.memory.test_offload_state import Deep, around_without_numbers, momentum, step_of


def test_an_update_runs_where_its_state_lies() -> None:
    model = nn.Linear(4, 3, bias=False)
    step = meshc.TrainStep(model, optimizer=momentum(model), loss=F.mse_loss)
    ask = {"input": torch.zeros(4, 4), "target": torch.zeros(4, 3)}
    assert_expected_inline(around_without_numbers("offload_state", step, line="offload state, update", **ask), """\
- weight_momentum_buffer: "f32[weight.0 3, weight.1 4]" = "state:weight/momentum_buffer",
- weight_meshc_first: "f32[] whole" = "state:weight/meshc.first",
+ weight_momentum_buffer: "f32[weight.0 3, weight.1 4] host" = "state:weight/momentum_buffer",
+ weight_meshc_first: "f32[] whole host" = "state:weight/meshc.first",
- sgd_default: "(f32[3, 4], f32[3, 4], f32[])" = meshc.sgd(weight, t_default_3, weight_momentum_buffer, weight_meshc_first, False, False)
- getitem: "f32[weight.0 3, weight.1 4]" = getitem(sgd_default, 0)
- getitem_1: "f32[weight.0 3, weight.1 4]" = getitem(sgd_default, 1)
- getitem_2: "f32[] whole" = getitem(sgd_default, 2)
+ to_host_2: "f32[weight.0 3, weight.1 4] host" = to_host(weight)
+ to_host_3: "f32[weight.0 3, weight.1 4] host" = to_host(t_default_3)
+ to_host_4: "f64[] whole host" = to_host(number_0_lr)
+ to_host_5: "f64[] whole host" = to_host(number_0_momentum)
+ to_host_6: "f64[] whole host" = to_host(number_0_dampening)
+ to_host_7: "f64[] whole host" = to_host(number_0_weight_decay)
+ sgd_default: "(f32[3, 4] host, f32[3, 4] host, f32[] host)" = meshc.sgd(to_host_2, to_host_3, weight_momentum_buffer, weight_meshc_first, to_host_4, to_host_5, to_host_6, to_host_7, False, False)
+ getitem: "f32[weight.0 3, weight.1 4] host" = getitem(sgd_default, 0)
+ getitem_1: "f32[weight.0 3, weight.1 4] host" = getitem(sgd_default, 1)
+ getitem_2: "f32[] whole host" = getitem(sgd_default, 2)
+ from_host_2: "f32[weight.0 3, weight.1 4]" = from_host(getitem, weight)
- "parameter:weight": getitem,
+ "parameter:weight": from_host_2,
""")


def small() -> Case:
    return nanogpt(torch.float64, layers=1)


@pytest.mark.parametrize(
    "make, mesh, lines, microbatches",
    [
        (small, "dp_shard=2,tp=2", "offload state, update", 1), broad(gpt2, "dp=2", "dp: batch; store state\noffload state, update", 1),
        broad(nanogpt, "pp=2,dp_shard=2", "offload state, update\noffload params", 2),
        broad(llama, "pp=2,dp=2", "offload state, update", 4), broad(llama, "tp=2", "offload state, update\noffload params\noffload *", 2),
        broad(nanogpt, "dp=2", "offload state, update h.*\noffload params h.1.*", 1),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_a_step_means_what_it_means(make: Callable[[], Case], mesh: str, lines: str, microbatches: int) -> None:
    """Parameters and state after each of three steps in double precision, gradients clipped; no state comes to the device."""
    program = step_of(make(), mesh, lines, microbatches)
    kinds = {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert {"parameter after step 2", "state exp_avg after step 2"} <= kinds
    compiled = program.compiled
    there = {port.key for port in compiled.inputs if port.kind == "state" and port.storage == "host"}
    assert there and all(stage.inputs[index] not in there for stage in compiled.stages.values() for index in _fetched(stage.graph))


def _fetched(graph: torch.fx.Graph) -> list[int]:
    """Positions of the inputs that come to the device."""
    entered = list(graph.find_nodes(op="placeholder"))
    return [entered.index(node.args[0]) for node in graph.nodes if node.target is spmd.from_host and node.args[0] in entered]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_layers_are_updated_while_backward_goes_on_below_them(backend: str) -> None:
    """On one rank nothing is reduced: each of twelve layers of 1 MiB goes out and is updated before the next gradient but one is made."""
    model = Deep()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    ask = {"args": (torch.zeros(4, 512),), "kwargs": {"target": torch.zeros(4, 512)}}
    one, plain = (meshc.compile(step, meshc.Mesh("dp=1"), plan=plan, backend=backend, **ask) for plan in ("offload state, update", None))
    (stage,) = one.compiled.stages.values()
    order = [
        node for node in stage.graph.nodes
        if "adam" in str(node.target) or ("mm" in str(node.target) and record(node).phase == "backward")
        or (spmd.is_host_copy(node.target) and record(node).shape)
    ]  # fmt: skip
    letters = "".join({spmd.from_host: "f", spmd.to_host: "t"}.get(node.target, "U" if runs_on_host(node) else "m") for node in order)
    assert letters.count("U") == 12 and letters.count("t") == 24 and letters.count("f") == 12
    updated = [index for index, letter in enumerate(letters) if letter == "U"]
    assert all("m" in letters[first:second] for first, second in zip(updated[:-1], updated[1:], strict=True)), letters
    held, whole = peak_memory.peak_rank(one.compiled), peak_memory.peak_rank(plain.compiled)
    mebi = 1024 * 1024
    assert whole.kept["state"] > 24 * mebi and "state" not in held.kept
    assert held.host >= 24 * mebi and held.peak.total < whole.peak.total


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("build", [broad(torch.optim.NAdam), broad(torch.optim.Adafactor), broad(torch.optim.Muon), torch.optim.Adagrad])
def test_optimizers_that_are_traced_run_there_too(build: Callable[..., torch.optim.Optimizer]) -> None:
    """What ranks do together for an update they do on the device, in between."""
    model = Net().double()
    chosen = [one for one in model.parameters() if one.dim() == 2] if build is torch.optim.Muon else model.parameters()
    step = meshc.TrainStep(model, optimizer=build(chosen, lr=0.1), loss=F.mse_loss, clip_grad_norm=1.0)
    ask = {"args": (torch.randn(8, 6).double(),), "kwargs": {"target": torch.randn(8, 4).double()}}
    program = meshc.compile(step, meshc.Mesh("dp_shard=2"), plan="offload state, update", **ask)
    assert any(map(runs_on_host, program.compiled.stage.graph.nodes))
    assert "parameter after step 0" in {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}


@pytest.mark.parametrize("options", [{"optimizer_state": "bf16"}, broad({"master_weights": True})], ids=str)
def test_state_in_fewer_bits_is_widened_there(options: dict[str, object]) -> None:
    model = Net().to(torch.bfloat16) if "master_weights" in options else Net()
    dtype = next(model.parameters()).dtype
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), loss=F.mse_loss)
    ask = {"args": (torch.randn(8, 6, dtype=dtype),), "kwargs": {"target": torch.randn(8, 4, dtype=dtype)}}
    program, plain = (
        meshc.compile(step, meshc.Mesh("dp_shard=2"), plan=plan, options=meshc.Options(**options), **ask)  # type: ignore[arg-type]
        for plan in ("offload state, update", None)
    )
    for one in (program, plain):
        assert meshc.verify(one).ok
    there = [node for node in program.compiled.stage.graph.nodes if runs_on_host(node)]
    assert any("_many_" in str(node.target) for node in there)
