"""What large models hold and take within budgets of memory, predicted: the tables of docs/memory-budgets.md. No device is needed.

    python bench/budgets.py                        # all rows, those that are in bench/results/budgets.json left out
    python bench/budgets.py --only llama-8b --anew # rows of one model, once more
    python bench/budgets.py --write                # and docs/memory-budgets.md carries what is there

The first table is one step under smaller and smaller budgets; the last of them is refused with the least that would do. The second has the
shapes of large models on nodes of eight H100s within 80 GB, by a recipe; where that is refused, as the refusal says first. Each row is a
process, measured one after another and kept as soon as it is there, so that a run that was stopped goes on where it was. Weights are on
the meta device, bfloat16, under AdamW with clipping; seconds are predicted from h100's table.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CPU seconds of idle threads are no one's

import torch  # noqa: E402
from carried import carry  # noqa: E402
from own_process import in_a_process  # noqa: E402
from plan_tables import MODELS  # noqa: E402
from tabulate import tabulate  # noqa: E402

import meshc  # noqa: E402
from meshc.api.planning import Planner, PlanResult  # noqa: E402
from meshc.cost import peak_memory  # noqa: E402
from meshc.cost.devices import device  # noqa: E402
from meshc.ir.mesh import Mesh  # noqa: E402
from meshc.passes.driver.search_errors import NothingFits  # noqa: E402

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "bench" / "results" / "budgets.json"
SEQUENCES = 64
ALL = 80
"""GB of an H100."""


MESHES = {8: "tp=8", 64: "dp=8,tp=8", 512: "dp=64,tp=8"}
RECIPES = {8: "megatron_sp", 64: "fsdp+megatron_sp", 512: "fsdp+megatron_sp"}


@dataclass(frozen=True)
class Asked:
    model: str
    ranks: int
    budget_gb: int
    follows: bool = False
    """What is refused is compiled as the refusal says."""
    host_gb: int | None = None
    """Of its host, what a rank may use to keep the budget."""

    @property
    def key(self) -> str:
        return f"{self.model} {self.ranks} {self.budget_gb}" + (f" host {self.host_gb}" if self.host_gb else "")


BUDGETS = [Asked("llama-8b", 64, size) for size in (48, 24, 12, 6)]
BUDGETS += [Asked("llama-8b", 64, size, host_gb=64) for size in (48, 24, 12, 6)]
SHAPES = [Asked(model, ranks, ALL, True) for model in ("llama-8b", "llama-70b", "mixtral-8x7b", "t5-11b") for ranks in MESHES]


@dataclass(frozen=True)
class Row:
    """
    way       the recipe, and what else the plan and the step are asked for: what the refusal named first
    held_gb   of a rank by the walk;  host_gb  on its host;  takes_ms  a step
    least_gb  where none fits: what the least that was found holds
    said      what backward recomputes, and chunks; of what is refused the first change that would do
    compile_s CPU seconds of all that was tried
    """

    step: str
    way: str
    held_gb: float | None
    host_gb: float
    takes_ms: float | None
    least_gb: float | None
    said: str
    compile_s: float


def measured(asked: Asked) -> Row:
    start, on = time.process_time(), device("h100")
    model, recipe = MODELS[asked.model], RECIPES[asked.ranks]
    with torch.device("meta"):
        module, inputs = model.build(SEQUENCES, model.tokens)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, weight_decay=0.1)
    mesh, budget = Mesh(MESHES[asked.ranks], device="cuda"), asked.budget_gb * 10**9

    def found(plan: str, microbatches: int | None = None, **options: Any) -> PlanResult:
        step = meshc.TrainStep(module, optimizer=optimizer, clip_grad_norm=1.0, microbatches=microbatches)
        asks = meshc.Options(memory_budget=budget, host_budget=asked.host_gb and asked.host_gb * 10**9, **options)
        return Planner(step, (), inputs).on(mesh, plan, device=on, options=asks)

    step, way = f"{SEQUENCES} x {model.tokens}", recipe
    one = found(recipe)
    if one.program is None:
        assert isinstance(one.refused, NothingFits), one.refused
        refusal = one.refused.with_changes_tried()
        change = next(iter(refusal.found.fits), None) if refusal.found is not None else None
        spent = time.process_time() - start
        if change is None or not asked.follows:
            closest = refusal.found.closest if refusal.found is not None and change is None else change
            sizes = [size for size in (refusal.least, closest and closest.holds) if size is not None]
            return Row(step, recipe, None, 0.0, None, min(sizes) / 1e9 if sizes else None, str(closest or ""), spent)
        one, way = found(change.plan, **change.asks), f"{recipe}, {change.said}"
        assert one.program is not None and peak_memory.peak_rank(one.program).total == change.holds, (one.refused, change)
    held, seconds = peak_memory.peak_rank(one.program), one.weighed[0].seconds
    assert held.total <= budget and seconds is not None
    spent = time.process_time() - start
    return Row(step, way, held.total / 1e9, held.host / 1e9, 1e3 * seconds, None, _said(one.program.notes), spent)


def _said(notes: list[str]) -> str:
    """What notes say of memory, in few words."""
    words = []
    for note in notes:
        again = note.partition("backward makes ")[2].partition(" values again")[0]
        there = note.partition(" and finds ")[2].partition(",")[0]
        words += [f"{again} recomputed"] if note.startswith("memory:") and again else []
        words += [there] if note.startswith("memory:") and there else []
        words += [f"`{note.partition('`')[2].partition('`')[0]}`"] if "has on its host" in note else []
        words += ["head in chunks"] if "chunks" in note else []
    return ", ".join(dict.fromkeys(words))


def kept() -> dict[str, Row]:
    return {key: Row(**row) for key, row in json.loads(KEPT.read_text()).items()} if KEPT.exists() else {}


def shown(rows: dict[str, Row]) -> str:
    sizes = ("budget, GB", "of the host, GB", "plan", "held, GB", "there, GB")
    heads = ("model", "ranks", "step", *sizes, "a step, ms", "", "compiling, CPU s")
    tables = []
    for several in (BUDGETS, SHAPES):
        cells = [[asked.model, asked.ranks, row.step, asked.budget_gb, asked.host_gb or "", row.way, *_figures(row)]
                 for asked in several if (row := rows.get(asked.key)) is not None]  # fmt: skip
        tables.append(tabulate(cells, heads, tablefmt="github", disable_numparse=True))
    return "\n\n".join(tables)


def _figures(row: Row) -> list[str]:
    refused = f"refused: the least that was found holds {row.least_gb:.1f} GB" if row.least_gb is not None else ""
    least = "; ".join(filter(None, (refused, row.said)))
    numbers = [f"{value:.1f}" if value else "" for value in (row.held_gb, row.host_gb)]
    return [*numbers, f"{row.takes_ms:.0f}" if row.takes_ms else "", least, f"{row.compile_s:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=MESHES, default=list(MESHES))
    parser.add_argument("--anew", action="store_true", help="also rows that are there")
    parser.add_argument("--write", action="store_true", help="docs/memory-budgets.md carries all rows that are there")
    options = parser.parse_args()
    rows = kept()
    for asked in (*BUDGETS, *SHAPES):
        if asked.model not in options.only or asked.ranks not in options.ranks or (asked.key in rows and not options.anew):
            continue
        try:
            row = in_a_process(measured, asked)
        except EOFError:  # its process said why
            continue
        rows = {**kept(), asked.key: row}  # others may have been kept meanwhile
        print(asked.key, asdict(row), flush=True)
        KEPT.write_text(json.dumps({key: asdict(row) for key, row in rows.items()}, indent=1) + "\n")
    print(shown(rows))
    if options.write:
        carry("memory-budgets.md", "bench/budgets.py", shown(rows))


if __name__ == "__main__":
    from transformers.models.llama import modeling_llama  # noqa: F401  # with the imports, not with the first row

    main()
