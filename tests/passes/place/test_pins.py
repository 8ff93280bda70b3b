"""Pins of values: which value a module's path names, how it then lies, and what cannot be held."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.ir import record, records, value_of
from tests.models import llama


class Gate(nn.Module):
    """A container whose own code computes nothing after its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 24), nn.Linear(24, 8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Pair(nn.Module):
    """Two outputs of two dims and one of three."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.inner(x)
        return y.sum(1), y.amax(1), y * 2.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([Gate(), Gate()])
        self.shared, self.pair = nn.Linear(8, 8), Pair()

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = x + gate(x)
        total, peak, whole = self.pair(self.shared(self.shared(x)))
        return (total * peak).sum(-1) + whole.sum((1, 2))


PLAN = "dp: batch\ntp: ffn"


def compiled(*pins: str) -> meshc.Program:
    torch.manual_seed(0)
    with torch.no_grad():
        inputs, lines = {"x": torch.randn(4, 6, 8)}, "\n".join((PLAN, *pins))
        return meshc.compile(Model(), meshc.Mesh("dp=2,tp=2"), kwargs=inputs, plan=lines, names={"x": ("batch", "seq", None)})


def returned(program: meshc.Program, module: str) -> list[str]:
    """How the values that a module returns lie where they are made: `4/dp, 6/tp, 8`, calls and outputs in order."""
    found = []
    for node in program.lowered.placed.graph.nodes:
        if node.op == "call_function" and len(records(node)) == 1 and module in record(node).returned_by:
            sharding = program.lowered.placed.require_assignment().given[value_of(node)]
            rows = [" * ".join("/".join(map(str, (part.size, *part.axes))) for part in parts) or "1" for parts in sharding.dims]
            found.append(", ".join(rows))
    return found


def test_a_container_is_pinned_at_what_it_returns() -> None:
    assert returned(compiled(), "gates.0") == returned(compiled(), "gates.0.down") == ["4/dp, 6, 8"]
    program = compiled("pin value:gates.0: batch/dp, seq/tp, _  only")
    assert returned(program, "gates.0") == ["4/dp, 6/tp, 8"]
    assert returned(program, "gates.1") == ["4/dp, 6, 8"]
    meshc.verify(program)


def test_a_glob_pins_every_module_that_it_matches() -> None:
    program = compiled("pin value:gates.?: batch/dp, seq/tp, _  only")
    assert returned(program, "gates.0") == returned(program, "gates.1") == ["4/dp, 6/tp, 8"]
    meshc.verify(program)


def test_every_call_of_a_module_is_pinned() -> None:
    assert returned(compiled(), "shared") == ["4/dp, 6, 8"] * 2
    program = compiled("pin value:shared: batch/dp, seq/tp, _  only")
    assert returned(program, "shared") == ["4/dp, 6/tp, 8"] * 2
    meshc.verify(program)


def test_outputs_of_the_pins_number_of_dims_are_pinned() -> None:
    assert returned(compiled(), "pair") == ["4/dp, 8", "4/dp, 8", "4/dp, 6, 8"]
    program = compiled("pin value:pair: batch/dp, pair.inner.weight.0/tp  only")
    assert returned(program, "pair") == ["4/dp, 8/tp", "4/dp, 8/tp", "4/dp, 6, 8"]
    meshc.verify(program)
    with pytest.raises(meshc.PlanError, match="value:pair has 2 or 3 dims, the pin has 1"):
        compiled("pin value:pair: batch/dp")


@pytest.mark.broad
def test_attention_returns_its_output_and_its_cache() -> None:
    case = llama(layers=1)
    plan = "tp: ffn\npin value:*.self_attn: batch!, seq/tp, _  only\npin value:*.self_attn: _, kv_heads/tp, _, _  only"
    with torch.no_grad(), pytest.raises(meshc.PlanError, match="3 and 4 dims"):  # one pattern, one number of dims
        meshc.compile(case.model, meshc.Mesh("tp=2"), kwargs={"input_ids": case.kwargs["input_ids"]}, plan=plan)
    with torch.no_grad():
        plan = plan.replace("value:*.self_attn: _", "value:model.layers.0.self_attn: _")
        program = meshc.compile(case.model.eval(), meshc.Mesh("tp=2"), kwargs={"input_ids": case.kwargs["input_ids"]}, plan=plan)
        meshc.verify(program)
    assert returned(program, "model.layers.0.self_attn") == ["6, 2/tp, 12, 2 * 4", "6, 2/tp, 12, 2 * 4", "6, 12/tp, 32"]


def test_a_train_step_with_pinned_containers_means_the_model() -> None:
    torch.manual_seed(0)
    model = Model().double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    program = meshc.compile(
        step, meshc.Mesh("dp=2,tp=2"), kwargs={"x": torch.randn(4, 6, 8).double(), "target": torch.randn(4).double()},
        plan=f"{PLAN}\npin value:gates.*: batch/dp, seq/tp, _", names={"x": ("batch", "seq", None)},
    )  # fmt: skip
    assert returned(program, "gates.0.up") == ["4/dp, 6/tp, 24"]  # the glob means submodules too
    assert meshc.verify(program, dtype=torch.float64).ok


def test_pins_of_one_value_under_two_names_must_agree() -> None:
    with pytest.raises(meshc.PlanError) as told:
        compiled("pin value:gates.0: batch/dp, seq/tp, _", "pin value:gates.0.down: batch/dp, seq!, _")
    assert "line 3, `pin value:gates.0: batch/dp, seq/tp, _` and line 4, `pin value:gates.0.down: batch/dp, seq!, _`" in str(told.value)
    assert "seq in dim 1 is split by tp in one and whole in the other" in str(told.value)


def test_a_name_that_matches_nothing_is_refused_with_one_that_is_close() -> None:
    with pytest.raises(meshc.PlanError, match=r"'value:gate.0' matches nothing; did you mean .*value:gates.0"):
        compiled("pin value:gate.0: batch/dp, _, _")


class Views(nn.Module):
    """Modules that lay out what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.lin = nn.Flatten(), nn.Linear(8, 8)
        self.wide = Widen()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.flat(x)).sum() + self.wide(self.lin(self.flat(x))).sum()


class Widen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[None].expand(4, -1, -1)


def test_what_no_operator_computes_cannot_be_held() -> None:
    def refused(pin: str) -> str:
        with torch.no_grad(), pytest.raises(meshc.PlanError) as told:
            meshc.compile(Views(), meshc.Mesh("tp=2"), kwargs={"x": torch.randn(6, 2, 4)}, plan=f"tp: -\n{pin}")
        return str(told.value)

    assert "value:flat is a layout of x, which enters the model so: pin that instead" in refused("pin value:flat: batch/tp, _")
    assert "dim 0 of value:wide is only laid out, by aten.expand: leave it open" in refused("pin value:wide: copies/tp, _, _")


def test_a_pin_of_a_value_that_ranks_recompute_is_noted_as_idle() -> None:
    class Table(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.arange(ids.shape[1], device=ids.device).float().cos()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.embed = Table(), nn.Embedding(11, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids) * self.table(ids)[:, None]

    plan = "tp: batch\npin value:table: seq/tp only"
    with torch.no_grad():
        program = meshc.compile(Model(), meshc.Mesh("tp=2"), kwargs={"ids": torch.zeros(4, 6, dtype=torch.int64)}, plan=plan)
    assert any("the pin of value:table has no effect" in note for note in program.compiled.notes)
