"""Formats that a plan leaves open: what the clock says of each kind of product, and the program of the lines that say what was chosen.

Programs are proved, and under the lines that were chosen a copy in float32, whose arithmetic is double there, is verified against the
model on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.cost.devices import Device, assume_device, device
from meshc.cost.program_clock import program_seconds
from meshc.errors import PlanError
from meshc.text.printer import hash_program

H100 = device("h100")
SLOW = replace(
    H100, name="slow", flops_per_s={name: rate / 1e5 for name, rate in H100.flops_per_s.items()}, launch_s=1e-8, collective_s=1e-8,
    inside_node=replace(H100.inside_node, latency_s=1e-8),
)  # fmt: skip
"""A device on which products of small sizes take longer than what is done around them."""


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Stack(nn.Module):
    """Blocks, a product whose sizes are no multiples of 16, a head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(64, 128) for _ in range(layers))
        self.odd, self.back = nn.Linear(64, 24, bias=False), nn.Linear(24, 64, bias=False)
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(F.silu(self.back(F.silu(self.odd(x)))))


def step(mesh: str, plan: str, on: Device = SLOW, dtype: torch.dtype = torch.bfloat16, layers: int = 2, **ask: Any) -> meshc.Program:
    torch.manual_seed(0)
    model = Stack(layers).to(dtype)
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss, **ask)
    inputs = torch.randn(16, 64, 64, dtype=dtype), torch.randn(16, 64, 32, dtype=dtype)
    with assume_device(on):
        return meshc.compile(train, meshc.Mesh(mesh), args=inputs[:1], kwargs={"target": inputs[1]}, plan=plan)


def said(program: meshc.Program) -> str:
    """The precision lines of its plan."""
    return "\n".join(map(str, program.compiled.plan.precisions))


def verified(program: meshc.Program, mesh: str, **ask: Any) -> bool:
    return program.prove().holds and meshc.verify(step(mesh, said(program), dtype=torch.float32, **ask)).worst < 1e-12


def lines(program: meshc.Program) -> Mapping[str, str]:
    return {line.pattern: line.format for line in program.compiled.plan.precisions}


ROWS = {"layers.*.up": "float8 row", "layers.*.down": "float8 row"}


@pytest.mark.parametrize("mesh", ["dp=4", "dp_shard=4", "tp=2", "dp_shard=2,tp=2", "sp=2", "dp=3"])
def test_what_is_chosen_is_one_device_and_the_program_of_its_lines(mesh: str) -> None:
    program = step(mesh, "precision *: auto")
    assert lines(program) == ROWS
    assert verified(program, mesh)
    assert hash_program(step(mesh, said(program)).compiled) == hash_program(program.compiled)


def test_a_pipeline_has_gradients_of_weights_as_they_are() -> None:
    """Its stages have one microbatch at a time, and no scale along all of them."""
    program = step("pp=2,dp=2", "precision *: auto", microbatches=4)
    assert {*lines(program).values()} == {"float8 row, gradients in bf16"} and {*lines(program)} == {*ROWS}
    assert verified(program, "pp=2,dp=2", microbatches=4)


def test_microbatches() -> None:
    program = step("dp=2", "precision *: auto", microbatches=2)
    assert lines(program) == ROWS and verified(program, "dp=2", microbatches=2)


def test_a_gain_is_the_difference_of_two_programs() -> None:
    program = step("dp_shard=2", "precision *: auto")
    with assume_device(SLOW):
        both = program_seconds(step("dp_shard=2", said(program)).compiled).total
        less = program_seconds(step("dp_shard=2", "precision layers.*.down: float8 row").compiled).total
    told = f"precision: layers.*.up is in float8 row: a call takes {(less - both) * 1e3:.1f} ms less for it (slow, predicted)"
    assert told in program.summary() and both < less


@pytest.mark.parametrize(
    "on, dtype, why",
    [
        (H100, torch.bfloat16, "precision: layers.*.up stays as it is: in float8 row a call would take "),
        (device("a100"), torch.bfloat16, "precision: layers.*.up stays as it is: a100 has no products of 8 bits"),
        (SLOW, torch.float32, "precision: layers.*.up stays as it is: the kernel for scales of rows gives bfloat16 alone"),
    ],
    ids=["too small", "no rate", "no kernel"],
)
def test_what_gains_nothing_stays_as_it_is(on: Device, dtype: torch.dtype, why: str) -> None:
    program = step("dp=2", "precision *: auto", on, dtype)
    assert not lines(program) and why in program.summary() and "changes what is computed" not in program.summary()
    assert hash_program(program.compiled) == hash_program(step("dp=2", "", on, dtype).compiled)


def test_what_a_summary_says_of_others() -> None:
    told = step("dp=2", "precision *: auto").summary()
    assert "precision: odd stays as it is: its sizes on a rank, 512 x 64 x 24, are no multiples of 16" in told
    assert "precision: head stays as it is: the model's output is made of it, and no line names it" in told
    assert "changes what is computed: precision layers.*.up: float8 row; precision layers.*.down: float8 row" in told


def test_lines_around_it() -> None:
    """Later lines count, a head that a line names is open like others, and modules of which no pattern is true of all are named one by
    one."""
    program = step("dp=2", "precision *: auto\nprecision head: auto\nprecision layers.*.down: float8 tensor\nprecision layers.1.up: bf16")
    assert lines(program) == {"head": "float8 row", "layers.0.up": "float8 row", "layers.*.down": "float8 tensor", "layers.1.up": "bf16"}
    formats = {name: one.name for name, (one,) in program.lowered.placed.traced.precision.items() if one is not None}
    assert formats["layers.0.up.weight"] == formats["head.weight"] == "float8 row" and formats["layers.1.up.weight"] == "bf16"
    assert "odd.weight" not in formats and meshc.verify(program, dtype=torch.float32).ok


def test_equal_layers_are_alike_at_any_depth() -> None:
    program = step("dp_shard=2", "precision *: auto", layers=8)
    assert lines(program) == ROWS and len(program.lowered.placed.traced.precision) == 16


def test_a_search_adds_no_format_unless_a_line_lets_it() -> None:
    program = step("x=2", "x: auto")
    assert not lines(program)
    program = step("x=2", "x: auto\nprecision *: auto")
    assert lines(program) == ROWS and not any(entry.auto for entry in program.compiled.plan.axes)
    assert verified(program, "x=2")


def test_other_sizes_have_the_formats_of_the_first() -> None:
    model, small = nn.Sequential(Block(64, 128), nn.Linear(64, 16)).to(torch.bfloat16), torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad(), assume_device(SLOW):
        program = meshc.compile(model, meshc.Mesh("dp=2"), args=(torch.randn(64, 64, dtype=torch.bfloat16),), plan="precision *: auto")
        chosen = lines(program)
        assert meshc.verify(program, inputs=(small,)).ok
        assert chosen == {"*.up": "float8 row", "*.down": "float8 row"} == lines(program)


@pytest.mark.parametrize(
    "plan, refused",
    [
        ("precision blocks.*: auto", "no product with a weight is in such a module"),
        ("precision layers.*: float8 tensor\nprecision *: auto", "write the line that says auto first, so that the other counts"),
        ("precision layers.*: auto row", "auto row is no format"),
        ("sparse layers.*: auto", "how many weights are left of how many"),
    ],
)
def test_what_does_not_fit_is_refused(plan: str, refused: str) -> None:
    with pytest.raises(PlanError, match=refused):
        step("dp=2", plan, layers=1)
