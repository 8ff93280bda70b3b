"""Batches of a loader. Rows of docs/ecosystem.md by checks of `tests/processes/`."""

from __future__ import annotations

from typing import Any

import meshc
from tests.frameworks.on_torch import X, compiled
from tests.frameworks.rows import Rows, same
from tests.processes import local_inputs, train_step
from tests.processes.session import run_checks

ROWS = Rows("data")
LOCAL = 'meshc.compile(..., inputs="local")'
UNEVEN = 'inputs="local", options=Options(local_inputs=LocalInputs(uneven_rows=True))'

for _what, _check, _line in (
    ("the same batches on every rank, the last one short", train_step.another_batch, ""),
    ("epochs of a DataLoader with DistributedSampler, batches loaded ahead, the last one short", local_inputs.an_epoch, LOCAL),
    ("ranks with other numbers of labels", local_inputs.unequal_labels, LOCAL),
    ("uneven rows per rank, none too, in a TrainStep", local_inputs.uneven_steps, UNEVEN),
    ("the same in module mode", local_inputs.uneven_module, UNEVEN),
    ("sequences of many lengths, programs kept by size, compiled from one trace", local_inputs.many_lengths, ""),
    ("one program for sizes that change from call to call", local_inputs.dynamic_sizes, "Options(dynamic=...)"),
):
    ROWS.row(_what, line=_line, mesh="dp=2")(_check)

TOLD = "Options(local_inputs=LocalInputs(uneven_rows=True)); both numbers are said"
ROWS.row("uneven rows without being told", refused=TOLD, mesh="dp=2")(local_inputs.short_batches)
ROWS.row("parts that differ in more than rows", refused="both are shown, by all ranks, which go on", mesh="dp=2")(local_inputs.unlike_parts)


@ROWS.row("a batch of one row over two ranks", mesh="dp=2")
def one_row(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    for ours in (model(X[:1]), twin(X[:1])):
        ours.square().sum().backward()
    same(model(X[:1]), twin(X[:1]))
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        same(mine.grad, wanted.grad)


@ROWS.row("batches copied to the device ahead", line="for batch in meshc.prefetch(loader, program)", mesh="dp=2")
def ahead(mesh: Any) -> None:
    model, twin, program = compiled(mesh)
    for batch in meshc.prefetch([X, X + 1], program):
        same(model(batch), twin(batch))


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
