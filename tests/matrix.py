"""The support matrix: every model kind under every plan that its structure allows, on every mesh, against the model on one device.

    python -m tests.matrix [--models llama,gpt2] [--only TEXT] [--sample N --seed S] [--limit-seconds T] [--fresh]

Finished cells are kept in out/matrix.jsonl, so a run that was stopped goes on where it was; cells that failed run again. The table is
written to docs/matrix.md after every run. What a cell runs depends on its place in the table and on nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from meshc.errors import CompileError
from tests import models
from tests.captured import Captured, Make
from tests.coverage_page import left_alone
from tests.table_command import command, in_time

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "out" / "matrix.jsonl"
TABLE = ROOT / "docs" / "matrix.md"

KINDS = ("llama", "gpt2", "bert", "vit", "resnet", "mlp")
AXES = {
    "ddp": ("dp",),
    "zero1": ("dp",),
    "zero2": ("dp",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "megatron": ("tp",),
    "megatron_sp": ("tp",),
    "ulysses": ("cp",),
}
DATA, TENSOR = ("ddp", "zero1", "zero2", "fsdp", "hsdp"), ("megatron", "megatron_sp")
FITS = {"resnet": DATA, "mlp": (*DATA, "megatron")}
"""Recipes that a kind has factors for; the others have all: batch, sequence, heads, ffn and (or classes) vocabulary."""

SIZES = {1: (2, 3, 4), 2: (2,), 3: (2,)}
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
}
CLIP = 0.5  # below the gradients' norm of all kinds, so that it acts
REFUSAL = "mixes the whole batch, so the batch cannot be cut into microbatches"


@dataclass(frozen=True)
class Cell:
    """One row of work. `whole_batch` says that the kind has batch norm, so that microbatches must be refused, or be steps of their own."""

    model: str
    plan: str
    mesh: str
    layers: int
    optimizer: str
    microbatches: int
    clip: bool
    inference: bool

    @property
    def key(self) -> str:
        parts = [self.model, self.plan, self.mesh, f"layers={self.layers}", self.optimizer, f"microbatches={self.microbatches}"]
        return " ".join([*parts, *["clip"] * self.clip, *["inference"] * self.inference])

    @property
    def whole_batch(self) -> bool:
        return self.model == "resnet"


def plans(model: str) -> list[str]:
    """All joins of recipes, at most one that splits the batch, one that splits tensors, one that splits the sequence in attention."""
    fits = FITS.get(model, tuple(AXES))
    found = []
    for data in ("", *DATA):
        for tensor in ("", *TENSOR):
            for sequence in ("", "ulysses"):
                names = [name for name in (data, tensor, sequence) if name]
                if names and all(name in fits for name in names) and len(axes(names)) <= 3:
                    found.append("+".join(names))
    return sorted(found, key=lambda plan: len(axes(plan.split("+"))))


def axes(names: Sequence[str]) -> list[str]:
    return [axis for name in names for axis in AXES[name]]


def cells(kinds: Sequence[str] = KINDS) -> list[Cell]:
    """The table. Optimizer, microbatches and clipping turn with the place, so that each kind meets every combination."""
    found = []
    for kind in kinds:
        place = 0
        for plan in plans(kind):
            names = axes(plan.split("+"))
            for size in SIZES[len(names)]:
                mesh = ",".join(f"{axis}={size}" for axis in names)
                found.append(
                    Cell(
                        kind, plan, mesh, 2 if size == 2 and len(names) < 3 else 1, list(OPTIMIZERS)[place % 2], 1 + place % 3,
                        bool(place // 6 % 2), place % 2 == 0,
                    )  # fmt: skip
                )
                place += 1
    return found


@cache
def captured_parts(model: str, count: int) -> Captured:
    """A step that is the mean of its microbatches: 12 rows are 6 or 4 in each, which 2, 3 and 4 ranks do and do not divide."""
    torch.manual_seed(0)
    return Captured(models.FACTORIES[model](batch=12), train=True, double=True, mean_of=count)


@cache
def captured(model: str, layers: int, train: bool) -> Captured:
    """Two layers with a batch of 6, one with a batch of 7: what divides by a mesh, and what does not."""
    torch.manual_seed(0)
    if model in ("resnet", "mlp"):
        case = models.FACTORIES[model](batch=6 if layers == 2 else 7)
    else:
        case = models.FACTORIES[model](batch=6 if layers == 2 else 7, layers=layers)
    return Captured(case, train=train, double=train)


def run(cell: Cell) -> dict[str, Any]:
    """Verify one cell; its result as it is kept. Errors are results too."""
    begin = time.process_time()
    result: dict[str, Any] = {"key": cell.key, "refused": False}
    try:
        training = captured(cell.model, cell.layers, True)
        if cell.whole_batch and cell.microbatches > 1:
            check_refused(cell)
            result["refused"], training = True, captured_parts(cell.model, cell.microbatches)
        clip = CLIP if cell.clip else None
        report = training.verify_training(cell.mesh, cell.plan, OPTIMIZERS[cell.optimizer], clip=clip, microbatches=cell.microbatches)
        result.update(training=report.worst, tensors=len(report.rows))
        if cell.inference:
            result["inference"] = captured(cell.model, cell.layers, False).verify_inference(cell.mesh, cell.plan).worst
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["seconds"] = round(time.process_time() - begin, 1)
    return result


def check_refused(cell: Cell) -> None:
    try:
        captured(cell.model, cell.layers, True).program(cell.mesh, cell.plan, microbatches=cell.microbatches)
    except CompileError as error:
        if REFUSAL not in str(error):
            raise AssertionError(f"refused for another reason: {error}") from error
        return
    raise AssertionError("batch norm with microbatches was compiled, and should be refused")


def read_results() -> dict[str, dict[str, Any]]:
    """Finished cells by key; of several results of a cell, the last."""
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines() if line]
    return {row["key"]: row for row in rows}


def table(results: dict[str, dict[str, Any]]) -> str:
    """docs/matrix.md."""
    everything = cells()
    rows = {cell: results[cell.key] for cell in everything if cell.key in results}
    good = {cell: row for cell, row in rows.items() if "error" not in row}
    inference = [row["inference"] for row in good.values() if "inference" in row]
    training = [row["training"] for row in good.values()]
    refused = sum(row["refused"] for row in rows.values())
    lines = [
        "# The support matrix",
        "",
        "Written by `make matrix` (`python -m tests.matrix`), which simulates all ranks in one process and compares with the unmodified",
        "model on one device. It can be stopped and goes on where it was; `--sample N --seed S` runs some of it, `--fresh` starts over.",
        "",
        "A cell is a model kind, a plan and a mesh. It runs",
        "",
        "- a **training** verification in float64: loss and every gradient, then two steps with the optimizer: losses and all updated",
        "  parameters. Allowed error: 1e-10, of what AdamW updates 1e-8, since Adam divides a gradient by its own size plus eps, so",
        "  that the rounding of one that is zero in exact arithmetic (a key's bias) comes out times lr / eps. Optimizer (AdamW with weight",
        f"  decay, or SGD with momentum 0.9), number of microbatches (1, 2, 3) and clipping of the gradients' norm (none, {CLIP}) turn",
        "  from cell to cell: each kind meets every combination;",
        "- in every other cell an **inference** verification in float32: all outputs, in evaluation mode under `no_grad` (allowed 1e-5).",
        "",
        "Meshes (2) and (2,2) run two layers and a batch of 6, the others one layer and a batch of 7 (ResNet and the MLP: their one",
        "depth), so that uneven tiles and uneven microbatches occur everywhere. Dropout is on in training where the stock configuration",
        "has it. The error of a tensor is max|a-b| / max(max|b|, 1e-3 of the largest entry among tensors of its kind). Padding is NaN in",
        "the simulator. Capture and differentiation, which know neither mesh nor plan, are done once for a model and shared by its",
        "cells; all later passes run for each.",
        "",
        f"{len(rows)} of {len(everything)} cells were run: {len(good)} agree, {len(rows) - len(good)} do not. Worst error: training "
        f"{max(training, default=0.0):.1e}, inference {max(inference, default=0.0):.1e} ({len(inference)} cells).",
        f"{sum(error > 1e-10 for error in training)} cells, all with AdamW, are above 1e-10 in updated parameters.",
        f"ResNet's batch norm mixes the batch, so exact microbatches are refused as specified: {refused} cells checked that message, and",
        'then verified training with batch_mix="mean_of_parts" (a batch of 12), against plain accumulation of loss / M part by part.',
        "",
        "| model | plan | mesh | training ran | training error | inference error |",
        "|---|---|---|---|---|---|",
    ]
    for cell in everything:
        row = rows.get(cell)
        ran = f"{cell.optimizer}, {cell.microbatches} microbatch{'es' * (cell.microbatches > 1)}{', clip' * cell.clip}"
        if row is not None and row["refused"]:
            ran = f"{ran}, mean of parts"
        found = "not run" if row is None else "FAILED" if "error" in row else f"{row['training']:.1e}"
        other = f"{row['inference']:.1e}" if row and "inference" in row else ("" if not cell.inference or row else "not run")
        lines.append(f"| {cell.model} | {cell.plan} | ({cell.mesh}) | {ran} | {found} | {other} |")
    failed = [(cell, row) for cell, row in rows.items() if "error" in row]
    if failed:
        lines += ["", "## Cells that do not agree", ""]
        lines += [f"- `{cell.key}`: {row['error'].splitlines()[0]}" for cell, row in failed]
    return "\n".join(lines) + "\n"


def chosen(arguments: argparse.Namespace) -> list[Cell]:
    found = [cell for cell in cells(arguments.models.split(",")) if arguments.only in cell.key]
    if arguments.sample:
        found = random.Random(arguments.seed).sample(found, min(arguments.sample, len(found)))
    return found


def main() -> int:
    parser = command("tests.matrix", __doc__)
    parser.add_argument("--models", default=",".join(KINDS), help="kinds, joined by commas")
    parser.add_argument("--only", default="", help="only cells whose key has this text: 'zero1+ulysses dp=2'")
    parser.add_argument("--sample", type=int, default=0, help="so many cells at random")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    if arguments.fresh:
        RESULTS.unlink(missing_ok=True)
    done = {key for key, row in read_results().items() if "error" not in row}
    work = [cell for cell in chosen(arguments) if cell.key not in done]
    failures = 0
    for place, cell in in_time(work, arguments.limit_seconds):
        row = run(cell)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        failures += "error" in row
        errors = ", ".join(f"{kind} {row[kind]:.1e}" for kind in ("training", "inference") if kind in row)
        found = row.get("error") or errors
        print(f"{place} {cell.key}: {found}{' (mean of parts)' * row['refused']}, {row['seconds']} s", flush=True)
    rows = read_results()
    if not left_alone(parser, arguments, len({cell.key for cell in cells(KINDS)} - set(rows)), TABLE):
        TABLE.write_text(table(rows))
        print(f"{TABLE.relative_to(ROOT)} is written")
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
