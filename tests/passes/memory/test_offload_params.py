"""Parameters on the host: they come for each module that reads them, forward and backward, and for their update, and go back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

import meshc
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.ir import record, spmd
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt
from tests.passes.memory.test_offload import Gated
from tests.passes.memory.test_offload_state import Deep, step_of
from tests.passes.stepped import around, changed


def test_each_phase_has_a_copy_of_its_own_and_lays_it_out_for_itself() -> None:
    before, after = around("offload_params", Gated(), "dp=2", "dp: batch\noffload params", x=torch.zeros(4, 3))
    assert_expected_inline(changed(before, after), """\
- up_weight: "f32[ffn 4, up.weight.1 3]" = "parameter:up.weight",
- down_weight: "f32[down.weight.0 3, ffn 4]" = "parameter:down.weight",
+ up_weight: "f32[ffn 4, up.weight.1 3] host" = "parameter:up.weight",
+ down_weight: "f32[down.weight.0 3, ffn 4] host" = "parameter:down.weight",
- t_default: "f32[up.weight.1 3, ffn 4]" = aten.t(up_weight)
+ from_host: "f32[ffn 4, up.weight.1 3]" = from_host(up_weight)
+ t_default: "f32[up.weight.1 3, ffn 4]" = aten.t(from_host)
- t_default_1: "f32[ffn 4, down.weight.0 3]" = aten.t(down_weight)
+ from_host_1: "f32[down.weight.0 3, ffn 4]" = from_host(down_weight)
+ t_default_1: "f32[ffn 4, down.weight.0 3]" = aten.t(from_host_1)
- t_default_3: "f32[down.weight.0 3, ffn 4]" = aten.t(t_default_1)
+ from_host_2: "f32[down.weight.0 3, ffn 4]" = from_host(down_weight)
+ t_default_9: "f32[ffn 4, down.weight.0 3]" = aten.t(from_host_2)
+ t_default_3: "f32[down.weight.0 3, ffn 4]" = aten.t(t_default_9)
""")


def test_lines_name_parameters_and_those_about_none_are_refused() -> None:
    def compiled(plan: str) -> meshc.Program:
        return meshc.compile(Gated(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3),), plan=plan)

    assert {port.name for port in compiled("offload params up.*").compiled.inputs if port.storage == "host"} == {"up.weight"}
    with pytest.raises(PlanError, match=r"`offload params h\.\*`: no parameter of this name is read; up\.weight is, for one"):
        compiled("offload params h.*")
    with pytest.raises(PlanError, match="the optimizer of a module is torch's, and updates parameters on the device"):
        meshc.compile(Gated(), meshc.Mesh("dp=2", "cuda"), args=(torch.zeros(4, 3),), plan="offload params")


def small() -> Case:
    return nanogpt(torch.float64, layers=1)


@pytest.mark.parametrize(
    "make, mesh, lines, microbatches",
    [
        (small, "dp_shard=2,tp=2", "offload params", 1), broad(nanogpt, "pp=2,dp_shard=2", "offload params\noffload state", 2),
        broad(llama, "dp=2,tp=2", "offload params\noffload state\noffload *", 2), broad(gpt2, "dp_shard=2,tp=2", "offload params", 2),
        broad(llama, "pp=2,dp=2", "offload params model.layers.*", 4), broad(llama, "dp_shard=2", "remat *: layer\noffload params", 1),
        broad(gpt2, "tp=2", "offload params\nchunk lm_head: 4", 1),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_a_step_means_what_it_means(make: Callable[[], Case], mesh: str, lines: str, microbatches: int) -> None:
    """Parameters, tied ones too, and state after each of three steps in double precision, with clipping; and that parameters are there."""
    program = step_of(make(), mesh, lines, microbatches)
    kinds = {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert {"parameter after step 2", "state exp_avg after step 2"} <= kinds
    compiled, plain = program.compiled, step_of(make(), mesh, None, microbatches).compiled
    for found, whole in zip(peak_memory.by_rank(compiled), peak_memory.by_rank(plain), strict=True):
        assert found.kept.get("parameter", 0) < whole.kept["parameter"] <= found.kept.get("parameter", 0) + found.host


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp_shard=2"])
def test_parameters_come_ahead_of_their_layer_and_are_gone_behind_it(mesh: str, backend: str) -> None:
    """Twelve layers of 1 MiB, or of half of it on each of two ranks that gather them: of all a few are on the device at a time."""
    model = Deep()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    ask = {"args": (torch.zeros(4, 512),), "kwargs": {"target": torch.zeros(4, 512)}}
    one, plain = (meshc.compile(step, meshc.Mesh(mesh), plan=plan, backend=backend, **ask) for plan in ("offload params", None))
    (stage,) = one.compiled.stages.values()
    nodes = list(stage.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    fetches = [node for node in nodes if node.target is spmd.from_host]
    assert [sum(record(node).phase == phase for node in fetches) for phase in ("forward", "backward", "update")] == [12, 11, 12]
    products = [node for node in nodes if "mm" in str(node.target)]
    read = [min(place[user] for user in node.users) for node in fetches]
    assert all(place[node] < reader for node, reader in zip(fetches, read, strict=True))
    assert place[fetches[6]] > place[products[0]] and place[fetches[1]] < place[products[0]]
    held, whole = peak_memory.peak_rank(one.compiled), peak_memory.peak_rank(plain.compiled)
    assert "parameter" not in held.kept and held.host == whole.kept["parameter"]
    assert whole.total - held.total > 0.4 * held.host
