"""meshc's own operators refuse operands that do not fit together, real ones and fake ones, before a kernel starts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import meshc  # noqa: F401 - registers the operators
from tests.ops.misfits import calls

ops = torch.ops.meshc


@pytest.mark.processes
def test_operands_that_do_not_fit_are_refused() -> None:
    found = subprocess.run([sys.executable, "-m", "tests.ops.misfits"], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, f"ended by {found.returncode} at {found.stdout.splitlines()[-1:]}\n{found.stderr[-2000:]}"
    lines = found.stdout.splitlines()
    assert len(lines) == 2 * len(list(calls())) and {line.partition(": ")[0] for line in lines} == {"fake", "real"}
    assert [line for line in lines if line.rpartition(": ")[2] not in ("ValueError", "RuntimeError")] == []


def test_the_message_names_the_operator_the_rule_and_what_was_given() -> None:
    with pytest.raises(ValueError) as raised:
        ops.dropout_backward(torch.ones(8), torch.ones(2, dtype=torch.bool), 0.5)
    said = "meshc::dropout_backward: mask is bool and has the shape of grad; given are grad float32 [8] on cpu, mask bool [2] on cpu"
    assert str(raised.value) == said


@pytest.mark.parametrize("ends", [[-5, 3, 8], [3, 1, 8], [2, 100, 4], [1 << 60, -1, 2]])
def test_ends_of_runs_are_not_trusted(ends: list[int]) -> None:
    rows, matrices = torch.randn(8, 4), torch.randn(3, 4, 2)
    settled = torch.tensor(ends).clamp(0, 8).cummax(0).values
    assert torch.equal(ops.grouped_mm(rows, matrices, torch.tensor(ends)), ops.grouped_mm(rows, matrices, settled))
    assert torch.equal(ops.grouped_outer(rows, rows, torch.tensor(ends)), ops.grouped_outer(rows, rows, settled))


@pytest.mark.parametrize("choice", [[-1, 5, 1], [1 << 60, 0, -(1 << 60)]])
def test_choices_that_are_no_matrix_give_zeros(choice: list[int]) -> None:
    rows, matrices = torch.randn(3, 4), torch.randn(2, 4, 2)
    wanted = [rows[i] @ matrices[one] if 0 <= one < 2 else torch.zeros(2) for i, one in enumerate(choice)]
    assert torch.allclose(ops.routed_mm(rows, matrices, torch.tensor(choice)), torch.stack(wanted))
