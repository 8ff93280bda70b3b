"""What a summary says of a rank's memory."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

import meshc
from meshc.cost.liveness import peak_liveness
from meshc.report.memory_report import LARGEST, fold_layers, largest
from meshc.report.summary import summary
from tests.passes.depth.stacks import Stack, compiled


@pytest.mark.broad
def test_equal_layers_are_one_row() -> None:
    program = compiled(Stack([16] * 5), plan="ddp").compiled
    found = peak_liveness(program)
    rows = fold_layers(found.values)
    assert sum(one.bytes for _, values in rows for one in values) == found.holds.peak.total
    sizes = [sum(one.bytes for one in values) for _, values in rows]
    assert sizes == sorted(sizes, reverse=True) and max(len(values) for _, values in rows) >= 4
    assert len(largest(found).splitlines()) == 3 + min(len(rows), LARGEST) + (len(rows) > LARGEST)


def test_the_largest_values_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.mse_loss)
    program = meshc.compile(step, meshc.Mesh("dp=2"), args=(torch.zeros(64, 8),), kwargs={"target": torch.zeros(64, 8)}, plan="ddp")
    text = program.summary()
    shown = text[text.index("largest at the peak") : text.index("\n\n", text.index("largest at the peak"))]
    assert_expected_inline("\n".join(line.rstrip() for line in shown.splitlines()), """\
largest at the peak, of 15.5 kB that the call has made by then (equal layers as one)
  bytes/rank    count    value                          made by           at    read last by
  ------------  -------  -----------------------------  ----------------  ----  -------------------------
  4.1 kB        1        float32 [batch 64/dp, ffn 32]  forward addmm, 0        backward gelu_backward, 1
  4.1 kB        1        float32 [batch 64/dp, ffn 32]  forward gelu, 1         backward mm, 2
  4.1 kB        1        float32 [batch 64/dp, ffn 32]  backward mm, 2          backward gelu_backward, 1
  2.2 kB        1        gradients, reduced together    forward mul             the end of the call
  1.0 kB        1        float32 [batch 64/dp, 8]       backward mul            backward sum, 2""")


def test_a_budget_stands_in_the_table_and_in_the_drawing() -> None:
    program = compiled(Stack([16] * 3), plan="ddp")
    held = peak_liveness(program.compiled).holds.total
    text = summary(program.compiled, budget=held + held // 10)
    assert "  the budget" in text and "budget " in text and "┄┄┄" in text
    assert "budget" not in summary(program.compiled)
