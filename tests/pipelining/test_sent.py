"""Values of inputs alone that several stages need: made by one and sent where that is cheaper, otherwise made by each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.passes.stages import schedules
from meshc.program.program import PlainProgram
from tests.broad import broad

ROWS, WIDE = 32, 4096
"""A product of (ROWS, WIDE) with itself takes longer on the table's CPU than a message of the result."""


def costly(e: Tensor) -> Tensor:
    return torch.softmax((e @ e.transpose(1, 2)).cumsum(-1), -1)


def cheap(e: Tensor) -> Tensor:
    return torch.softmax(e[:, :, :ROWS].cumsum(-1), -1)


def drawn(e: Tensor) -> Tensor:
    return torch.softmax(F.dropout(e @ e.transpose(1, 2) / WIDE, 0.5), -1)


class Mixing(nn.Module):
    """Four layers that mix rows by a table made of an input, or of a buffer."""

    def __init__(self, table: Callable[[Tensor], Tensor], buffer: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)  # with others `Waves` may be so sensitive that `verify` cannot tell
        self.table = table
        self.register_buffer("e", torch.randn(1, ROWS, WIDE) if buffer else None)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        mix = self.table(e if self.e is None else self.e)
        for layer in self.layers:
            x = x + mix @ torch.tanh(layer(x))
        return x


def step(model: nn.Module, count: int = 2, mesh: str = "pp=2", **options: object) -> tuple[meshc.Program, dict[str, Tensor]]:
    """In float64, as it is verified: both are of one trace."""
    torch.manual_seed(0)
    model.double()
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss, microbatches=count)
    inputs = {name: torch.randn(4, ROWS, width).double() for name, width in (("x", 8), ("e", WIDE), ("target", 8))}
    return meshc.compile(train, meshc.Mesh(mesh), kwargs=inputs, options=meshc.Options(**options)), inputs  # type: ignore[arg-type]


def makers(program: PlainProgram, operator: str) -> list[str]:
    return [name for name, stage in program.stages.items() if any(operator in str(node.target) for node in stage.graph.nodes)]


def flowing(program: PlainProgram, word: str) -> int:
    assert program.pipeline is not None
    return sum(word in key for keys in program.pipeline.messages.values() for key in keys)


@pytest.mark.parametrize("schedule", ["1f1b", broad("interleaved"), broad("zb_v")])
def test_a_costly_value_is_made_by_one_stage(schedule: str) -> None:
    """Stages of the second rank get it once, however many read it, and keep it for backward."""
    splits = ["layers.2"] if schedules.get(schedule).stages(2) == 2 else ["layers.1", "layers.2", "layers.3"]
    program, inputs = step(Mixing(costly), schedule=schedule, pp_splits=splits)
    assert makers(program.compiled, "cumsum") == ["forward_0"] and flowing(program.compiled, "softmax") == 1
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


def test_a_cheap_value_is_made_by_each_stage_that_reads_it() -> None:
    program, inputs = step(Mixing(cheap), schedule="1f1b")
    assert {"forward_0", "forward_1"} <= set(makers(program.compiled, "cumsum")) and flowing(program.compiled, "softmax") == 0
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


def test_a_value_with_random_numbers_in_it() -> None:
    program, inputs = step(Mixing(drawn), schedule="1f1b", mesh="pp=2,dp=2")
    assert makers(program.compiled, "bmm") and flowing(program.compiled, "softmax") == 1
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


@pytest.mark.parametrize("count", [2, broad(1)])
def test_a_value_of_a_buffer(count: int) -> None:
    """It does not differ between microbatches: with several of them, each rank makes it once a call."""
    program, inputs = step(Mixing(costly, buffer=True), count, schedule="1f1b")
    assert makers(program.compiled, "cumsum") == (["forward_0"] if count == 1 else ["before_0", "before_1"])
    assert flowing(program.compiled, "softmax") == (count == 1)
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


class Waves(Mixing):
    """Two tables, both of one costly value."""

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        angle = costly(e)
        for layer in self.layers:
            x = x + angle.cos() @ torch.tanh(layer(x)) + angle.sin() @ x
        return x


def test_what_two_values_are_made_of_is_sent_instead_of_both() -> None:
    program, inputs = step(Waves(costly), schedule="1f1b", pp_splits=["layers.2"])
    assert flowing(program.compiled, "softmax") == 1 and flowing(program.compiled, "cos") == flowing(program.compiled, "sin") == 0
    assert makers(program.compiled, "cumsum") == ["forward_0"] and {"forward_0", "forward_1"} <= set(makers(program.compiled, "aten.cos"))
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


class Skipping(nn.Module):
    """What the first layer makes is read by all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        first = y = torch.tanh(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            y = torch.tanh(layer(y)) * first
        return y


@pytest.mark.parametrize("schedule", ["zb_v", broad("interleaved")])
def test_a_value_goes_to_a_rank_once(schedule: str) -> None:
    """Of stages 0 to 3 two are on the second rank."""
    splits = [f"layers.{number}" for number in (1, 2, 3)]
    program, inputs = step(Skipping(), schedule=schedule, pp_splits=splits)
    pipeline = program.compiled.pipeline
    assert pipeline is not None
    received = [(pipeline.schedule.rank_of(link.target), key) for link, keys in pipeline.messages.items() for key in keys]
    assert len(received) == len(set(received)) and (1, "flow:tanh_default") in received
    assert meshc.verify(program, inputs, dtype=torch.float64).ok
