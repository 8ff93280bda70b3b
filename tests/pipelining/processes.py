"""Ten cells of the pipelines' table on processes: every model, every schedule and every mesh at least once, one launch a mesh."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from meshc.ir.mesh import Mesh
from tests.coverage_page import PAGE, put
from tests.pipelining.cells import MICROBATCHES, STEPS
from tests.results import Results
from tests.runtime.launch import launch

CELLS: Final[dict[str, tuple[str, ...]]] = {
    "pp=2": ("llama zb_h1", "t5 dualpipe_v", "unet gpipe"),
    "pp=4": ("gpt2 interleaved", "mamba 1f1b"),
    "pp=2,dp=2": ("bert zb_v", "t5 interleaved"),
    "pp=2,tp=2": ("gpt2 gpipe", "mamba zb_h1"),
    "pp=2,dp=2,tp=2": ("llama dualpipe_v",),
}
"""By mesh: model and schedule."""
RANK_S: Final = 300
"""What a launch may take for each of its ranks."""


def on_ranks(mesh: str, cells: Iterable[str], torchrun: bool) -> dict[str, dict[str, Any]]:
    """A row for each cell: the largest error, or what went wrong."""
    size = Mesh(mesh).world_size
    ended = launch("tests.pipelining.ranks:run", mesh, *cells, ranks=size, torchrun=torchrun, timeout_s=RANK_S * size)
    rows = {}
    for line in ended.ranks[0].out.splitlines():
        found = json.loads(line)
        rows[found.pop("cell")] = {"ok": True, **found}
    for cell in cells:
        rows.setdefault(f"{cell} {mesh}", {"ok": False, "error": f"no result\n{ended}"})
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The section of docs/pipelines.md."""
    good = sum(row["ok"] for row in rows.values())
    lines = [
        "## What was compared on processes",
        "",
        "Written by `make pipelines` (`python -m tests.pipelining --torchrun`): the same step by `meshc.compile`, on ranks that torchrun",
        "has started and that talk by gloo, against the model on one device in float64: losses and gradient norms, every gradient of the",
        f"first step (in Adam's first moment), all parameters and buffers after each of {STEPS} steps, with {MICROBATCHES} microbatches.",
        f"{good} of {len(rows)} cells agree.",
        "",
        "| model | schedule | mesh | tensors compared | largest error |",
        "|---|---|---|---|---|",
    ]
    for mesh, cells in CELLS.items():
        for cell in cells:
            row = rows[f"{cell} {mesh}"]
            family, schedule = cell.split()
            found = f"{row['compared']} | {row['worst']:.0e}" if row["ok"] else "| not ok"
            lines.append(f"| {family} | `{schedule}` | `{mesh}` | {found} |")
    return "\n".join(lines) + "\n"


def run(fresh: bool) -> int:
    """Runs what has no good row yet, writes the table, and returns the exit code."""
    results = Results("pipelines-processes", fresh)
    for mesh, cells in CELLS.items():
        work = [cell for cell in cells if not results.rows.get(f"{cell} {mesh}", {}).get("ok")]
        if not work:
            continue
        for name, row in on_ranks(mesh, work, torchrun=True).items():
            results.rows[name] = row
            print(f"{name}: {row['worst']:.1e}" if row["ok"] else f"{name}: {row['error']}", flush=True)
        results.keep()
    rows = {name: results.rows[name] for name in (f"{cell} {mesh}" for mesh, cells in CELLS.items() for cell in cells)}
    put("pipelines on processes", table(rows), PAGE.with_name("pipelines.md"))
    return int(not all(row["ok"] for row in rows.values()))
