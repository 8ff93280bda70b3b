"""What a training job asks for beside frameworks, by checks that stand elsewhere (`tests/processes/`): a row each for docs/ecosystem.md."""

from __future__ import annotations

from tests.frameworks.rows import Rows
from tests.processes import generation, local_inputs, metrics, module_mode, optimizers, train_step
from tests.processes.session import run_checks

ROWS = Rows("meshc")

for _what, _check, _more in (
    ("optimizers in a TrainStep: several, in lists and wrappers", optimizers.trained, {"mesh": "dp=2"}),
    ("learning-rate schedules between steps", train_step.scheduled, {"mesh": "dp=2"}),
    ("autocast in the model and around the call", train_step.autocast, {"mesh": "dp=2"}),
    ("a loss that returns (loss, metrics)", metrics.whole, {"mesh": "dp=2"}),
    ("losses with targets of their own", train_step.loss_arguments, {"mesh": "dp=2"}),
    ("microbatches", train_step.microbatches, {"mesh": "dp=2"}),
    (
        "each rank its own rows, with other numbers of labels",
        local_inputs.unequal_labels,
        {"mesh": "dp=2", "line": 'meshc.compile(..., inputs="local")'},
    ),
    ("one program for sizes that change from call to call", local_inputs.dynamic_sizes, {"mesh": "dp=2", "line": "Options(dynamic=...)"}),
    ("several programs of one model: training, evaluation", module_mode.two_programs, {}),
    ("model.generate and program.generate of a stock model", generation.short, {}),
):
    ROWS.row(_what, **_more)(_check)  # type: ignore[arg-type]


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
