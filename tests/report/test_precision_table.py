"""The summary's table of products in few bits: of precision lines, of torch's functions, and those that decode before they multiply."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.cost.devices import device
from meshc.report.precision_table import precision_table

EIGHT = torch.float8_e4m3fn


def rows(program: meshc.Program, on: str) -> list[list[str]]:
    """The cells of each row."""
    lines = precision_table(program.compiled, device(on)).splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines[3:-1]]


def layers(dtype: torch.dtype, mesh: str, line: str) -> meshc.Program:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=dtype) for _ in range(3)))
    return meshc.compile(model, meshc.Mesh(mesh), args=(torch.randn(256, 256, dtype=dtype),), plan=line)


@pytest.mark.parametrize(
    "dtype, line, on, runs_as",
    [
        (torch.bfloat16, "float8 row", "h100", "kernel"),
        (torch.bfloat16, "float8 row", "a100", "emulated: a100 has no products of 8 bits"),
        (torch.float32, "float8 row", "h100", "emulated: the kernel for scales of rows gives bfloat16 alone"),
        (torch.float32, "float8 tensor", "h100", "kernel"),
        (torch.bfloat16, "float8 block", "h100", "kernel, of compute capability 9 alone"),
        (torch.bfloat16, "float8 block", "b200", "emulated: b200 has no kernel for scales of blocks"),
        (torch.bfloat16, "int8 row", "h100", "emulated: torch has no kernel for int8 with scales"),
    ],
)
def test_products_of_a_line(dtype: torch.dtype, line: str, on: str, runs_as: str) -> None:
    """Two products forward, since the head stays; three of backward, since nothing wants the gradient of what goes in; sizes of a rank."""
    found = rows(layers(dtype, "dp=2", f"precision *: {line}"), on)
    covered = {"tensor": "tensor", "row": "row", "block": "blocks of 128"}[line.split()[1]]
    assert {row[0] for row in found} == {"*"} and {row[4] for row in found} == {runs_as}
    assert [row[1].partition(", ")[2] for row in found] == [covered] * len(found)
    forward = [row for row in found if row[2].startswith("forward")]
    assert [row[2:4] for row in forward] == [["forward, 128 x 256 x 256", "2"]]
    assert sum(int(row[3]) for row in found) == 5


class Scaled(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones(())
        (a, b) = (a.to(EIGHT), b.to(EIGHT))
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), a.to(torch.float32) @ b.to(torch.float32).t()


def test_products_of_torch_and_decoded_ones() -> None:
    program = meshc.compile(Scaled(), meshc.Mesh("dp=2"), args=(torch.randn(32, 64), torch.randn(16, 64)), plan="dp: -")
    found = rows(program, "h100")
    assert [[row[1], row[2], row[4]] for row in found] == [
        ["e4m3, tensor", "forward, 32 x 64 x 16", "kernel"], ["e4m3", "forward, 32 x 64 x 16", "float32, once decoded"],
    ]  # fmt: skip


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 16, dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, ends)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = Experts(), nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.head(self.experts(x, ends).relu())


def test_experts_of_a_line_are_decoded() -> None:
    given = torch.randn(48, 32, dtype=torch.bfloat16), torch.tensor([8, 8, 24, 48], dtype=torch.int32)
    with torch.no_grad():
        program = meshc.compile(Routed(), meshc.Mesh("dp=2"), args=given, plan="precision *: float8 row\ndp: -")
    found = rows(program, "h100")
    assert [row[:3] + row[4:5] for row in found] == [["experts", "e4m3", "forward, 48 x 32 by 4 x 32 x 16", "bfloat16, once decoded"]]
