"""Values of forward that lie on the host until backward: where they leave, where they come back, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc import artifact
from meshc.cost import peak_memory
from meshc.cost.devices import assume_device, device
from meshc.cost.links import copy_seconds
from meshc.cost.roofline import seconds
from meshc.errors import PlanError
from meshc.ir import local_bytes, record, spmd
from meshc.text.printer import hash_program
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt
from tests.passes.memory.test_offload_state import step_of
from tests.passes.stepped import around, changed


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.exp(self.up(x)))


def test_a_value_leaves_behind_its_last_reader_and_views_are_taken_of_what_comes_back() -> None:
    assert_expected_inline(changed(*around("offload", Gated(), "dp=2", "dp: batch\noffload *", x=torch.zeros(4, 3))), """\
+ to_host: "f32[batch 4/dp, ffn 4] host" = to_host(exp_default)
- mm_default_2: "f32[down.weight.0 3, ffn 4] partial(sum: dp)" = aten.mm(t_default_2, exp_default)
+ from_host: "f32[batch 4/dp, ffn 4]" = from_host(to_host)
+ mm_default_2: "f32[down.weight.0 3, ffn 4] partial(sum: dp)" = aten.mm(t_default_2, from_host)
- mul_tensor: "f32[batch 4/dp, ffn 4]" = aten.mul.Tensor(mm_default_3, exp_default)
+ mul_tensor: "f32[batch 4/dp, ffn 4]" = aten.mul.Tensor(mm_default_3, from_host)
""")


def offloaded(program: meshc.Program) -> list[str]:
    copies = [node for stage in program.compiled.stages.values() for node in stage.graph.nodes if node.target is spmd.to_host]
    return [node.args[0].name for node in copies if len(node.args) == 1]


def test_lines_name_modules_or_what_they_return() -> None:
    """The exponential is made in the module itself; what `up` returns nothing reads in backward."""
    found = [
        offloaded(meshc.compile(Gated(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3),), plan=f"dp: batch\n{line}"))
        for line in ("offload down", "offload value:up", "offload *", "offload state")
    ]
    assert found == [[], [], ["exp_default"], []]
    with pytest.raises(PlanError) as caught:
        plan = "dp: batch\noffload layers.*\noffload value:mlp"
        meshc.compile(Gated(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3),), plan=plan)
    fix = "name modules as model.named_modules() does, with * for any text, or leave the line out"
    assert str(caught.value) == (
        "the plan does not fit this model:\n"
        f"  line 2, `offload layers.*`: forward runs no operator in such a module; {fix}\n"
        f"  line 3, `offload value:mlp`: no module of this name returns a value; {fix}"
    )


def test_nothing_is_offloaded_without_a_backward() -> None:
    with torch.no_grad():
        assert offloaded(meshc.compile(Gated(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3),), plan="dp: batch\noffload *")) == []


def small() -> Case:
    return nanogpt(torch.float64, layers=1)


@pytest.mark.parametrize(
    "make, mesh, lines, microbatches",
    [
        (small, "dp=2", "offload h.*", 2), broad(nanogpt, "pp=2", "offload *", 2), broad(llama, "dp=2,tp=2", "offload *", 1),
        broad(llama, "pp=2,dp=2", "offload *\noffload state", 4), broad(gpt2, "dp_shard=2,tp=2", "offload *\noffload state", 2),
        broad(llama, "dp_shard=2", "remat *: layer\noffload value:model.layers.*", 1),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_a_step_means_what_it_means(make: Callable[[], Case], mesh: str, lines: str, microbatches: int) -> None:
    program = step_of(make(), mesh, lines, microbatches)
    assert {"gradient", "parameter after step 2"} <= {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert offloaded(program)
    plain = peak_memory.peak_rank(step_of(make(), mesh, None, microbatches).compiled)
    assert peak_memory.peak_rank(program.compiled).total <= plain.total


class Stack(nn.Module):
    """What each layer keeps for backward is larger than what anything else takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_layers_keep_is_not_there_between_forward_and_backward(backend: str) -> None:
    """Of eight values of 1 MiB no more than four are on the device: the one that is read, and those that travel beside it."""
    x = torch.zeros(4096, 64)
    held, whole = (
        peak_memory.peak_rank(meshc.compile(Stack(), meshc.Mesh("dp=1"), args=(x,), plan=plan, backend=backend).compiled)
        for plan in ("offload layers.*", None)
    )
    mebi = 1024 * 1024
    assert held.host == 8 * mebi
    assert whole.total - held.total >= 4 * mebi


def test_the_next_is_on_its_way_while_one_is_read() -> None:
    program = meshc.compile(Stack(), meshc.Mesh("dp=1"), args=(torch.zeros(4096, 64),), plan="offload layers.*")
    nodes = list(program.compiled.stages["backward"].graph.nodes)
    fetches = [node for node in nodes if node.target is spmd.from_host]
    reads = [min(nodes.index(user) for user in node.users) for node in fetches]
    starts = [nodes.index(node) for node in fetches]
    assert len(fetches) == 8 and starts == sorted(starts)
    on = device("cpu")
    for node, start, read in list(zip(fetches, starts, reads, strict=True))[1:]:
        computed_s = sum(seconds(one, on) for one in nodes[start:read])
        assert copy_seconds(local_bytes(record(node)), on) <= computed_s < 0.01
    assert all(read < much_later for read, much_later in zip(reads, starts[2:], strict=False))  # no more than one waits to be read
    assert all(record(node).phase == "backward" for node in fetches)


def test_on_a_device_with_a_link_what_could_not_be_back_in_time_stays() -> None:
    """What the last product gives is read again at once. That copies of state cannot be hidden a note says, with what they take."""
    model = Gated()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    ask = {"args": (torch.zeros(4, 3),), "kwargs": {"target": torch.zeros(4, 3)}}
    with assume_device(device("h100")), pytest.warns(UserWarning, match="are not hidden behind"):
        program = meshc.compile(step, meshc.Mesh("dp=2"), plan="offload *\noffload state", **ask)
    stay, waits = (note for note in program.compiled.notes if note.startswith("offload:"))
    assert stay.startswith("offload: 1 of 2 values stay on the device, 24 bytes: backward reads them before they could be there and back")
    assert waits.startswith("offload: copies take 100.0 us of a call on h100 (51.2 GB/s each way), of which")
    assert offloaded(program) == ["exp_default"]


def test_a_saved_program_says_what_lies_on_the_host(tmp_path: Path) -> None:
    """It is read back to the same text, each line held against the rules of its operator."""
    model = Gated()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss, microbatches=2)
    ask = {"args": (torch.zeros(4, 3),), "kwargs": {"target": torch.zeros(4, 3)}}
    program = meshc.compile(step, meshc.Mesh("dp_shard=2"), plan="offload *\noffload state", **ask)
    program.save(tmp_path / "program")
    again = artifact.load(tmp_path / "program")
    assert hash_program(again) == hash_program(program.compiled)
    assert {port.of for port in again.inputs if port.storage == "host"} == {"up.weight", "down.weight"}
    assert peak_memory.peak_rank(again) == peak_memory.peak_rank(program.compiled)
    table = program.summary()
    assert "copies between device and host in one call" in table and "on the host, beside that" in table
