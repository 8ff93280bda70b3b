"""Families of the zoo in each format of products on each mesh: a training step, proved, and beside the model on one device.

    python -m tests.zoo.precision [--only llama,gpt2] [--format "float8 row"] [--mesh tp=3] [--limit-seconds T] [--fresh]

Cells are kept in out/precision.json, so a run that was stopped goes on where it was; cells that are not ok run again.
"""

from __future__ import annotations

import sys
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from tabulate import tabulate

import meshc
from meshc.errors import CompilerFault, PlanError
from meshc.ir.formats import FORMATS, WHOLE
from tests.coverage_page import left_alone, put
from tests.formats import SCALED
from tests.models import Case
from tests.results import Results
from tests.table_command import command, in_time
from tests.zoo.families import causal, masked
from tests.zoo.run import first_line
from tests.zoo.stock import STOCK

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "precision.md"
_WIDE: Final = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": _WIDE,
    "gpt2": {"n_embd": 128, "n_positions": 128},
    "bert": _WIDE,
    "t5": {},
    "vit": {},
    "whisper": {},
    "gemma2": {**_WIDE, "head_dim": 32},
    "qwen3": {**_WIDE, "head_dim": 32},
    "mixtral": _WIDE,
    "qwen3_moe": {**_WIDE, "head_dim": 32, "moe_intermediate_size": 128},
    "deepseek_v3": {
        **_WIDE, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "moe_intermediate_size": 128,
    },
    "gpt_oss": {**_WIDE, "head_dim": 32},
}  # fmt: skip
"""Family -> sizes for formats whose scales cover 16, 32 or 128 elements; {}: its inputs come in no such numbers of rows."""
EXPERTS: Final = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
MESHES: Final = ("dp=2", "dp_shard=2,tp=2", "tp=3", "dp_shard=3", "dp=2,cp=2", "pp=2,dp=2")
ROWS: Final = 128
REFUSED: Final = "refused"


def meshes(name: str) -> list[str]:
    """Six. Experts are split in the place of the sequence."""
    return [mesh.replace("cp", "ep") if name in EXPERTS else mesh for mesh in MESHES]


def cells() -> list[tuple[str, str, str]]:
    """(family, format, mesh) of all that fit."""
    fits = [(name, form) for name, form in product(FAMILIES, SCALED) if FAMILIES[name] or FORMATS[form].along == WHOLE]
    return [(name, form, mesh) for name, form in fits for mesh in meshes(name)]


def case(name: str, form: str) -> Case:
    if FORMATS[form].along == WHOLE:
        return STOCK[name].case(name)
    found = STOCK[name].case(name, **FAMILIES[name])
    torch.manual_seed(2)
    return Case(name, found.model, (masked if name == "bert" else causal)(None, ROWS))


def run(name: str, form: str, mesh: str) -> dict[str, Any]:
    """A cell: "ok", "refused" or what is wrong, the largest error beside one device, and how many weights have the format."""
    torch.manual_seed(1)
    try:
        found = case(name, form)
        optimizer, parts = torch.optim.SGD(found.model.parameters(), lr=0.1), 2 if "pp" in mesh and not FORMATS[form].spans_batch else 1
        step = meshc.TrainStep(found.model, optimizer=optimizer, loss=found.loss, microbatches=parts)
        program = meshc.compile(step, meshc.Mesh(mesh), kwargs=found.call_kwargs, plan=f"precision *: {form}")
        proof, report = program.prove(), meshc.verify(program)
    except CompilerFault as fault:
        return {"outcome": f"broken: {fault}"}
    except PlanError as stated:
        return {"outcome": REFUSED, "why": str(stated)}
    except Exception as error:
        return {"outcome": f"{type(error).__name__}: {error}"}
    return {
        "outcome": "ok" if proof.holds and report.ok else f"not proved: {proof}" if report.ok else str(report),
        "error": report.worst,
        "weights": len(program.lowered.placed.traced.precision),
    }


def key(cell: tuple[str, str, str]) -> str:
    return " | ".join(cell)


def is_ok(row: dict[str, Any] | None) -> bool:
    return row is not None and row["outcome"] in ("ok", REFUSED)


def table(rows: dict[str, Any]) -> str:
    """A row for each family: weights in few bits, the largest error of each format, and what was refused."""
    told = []
    for name in FAMILIES:
        line: list[object] = [name]
        for form in SCALED:
            mine = [rows[key(cell)] for cell in cells() if cell[:2] == (name, form)]
            errors = [row["error"] for row in mine if row["outcome"] == "ok"]
            worst = f"{max(errors):.0e}" if errors else "-"
            line.append(worst + f", {len(mine) - len(errors)} refused" * (len(errors) < len(mine) and bool(mine)))
        told.append(line)
    count = sum(row["outcome"] == "ok" for row in rows.values())
    return (
        f"Written by `make precision`. The largest error of a training step (SGD) beside one device, of {len(MESHES)} meshes "
        f"({', '.join(f'`{mesh}`' for mesh in MESHES)}; with `ep` in the place of `cp` where there are experts), in float64. "
        f"{count} of {len(rows)} cells equal one device, and their programs are proved; "
        f"{sum(row['outcome'] == REFUSED for row in rows.values())} are refused, with what to write in "
        "place of the line.\n\n" + tabulate(told, ["", *SCALED], tablefmt="github") + "\n"
    )


def main() -> int:
    parser = command("tests.zoo.precision", __doc__)
    parser.add_argument("--only", default="", help="families, joined by commas")
    parser.add_argument("--format", default="", choices=["", *SCALED], help="one format")
    parser.add_argument("--mesh", default="", help="one mesh")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    only = arguments.only.split(",") if arguments.only else list(FAMILIES)
    if unknown := sorted(set(only) - set(FAMILIES)):
        parser.error(f"{', '.join(unknown)}: not among {', '.join(FAMILIES)}")
    results = Results("precision", arguments.fresh)
    wanted = [
        cell for cell in cells() if cell[0] in only and arguments.format in ("", cell[1]) and arguments.mesh in ("", cell[2])
    ]  # fmt: skip
    work = [cell for cell in wanted if arguments.only or not is_ok(results.rows.get(key(cell)))]
    failures = 0
    for place, cell in in_time(work, arguments.limit_seconds):
        before = time.process_time()
        row = results.rows[key(cell)] = run(*cell)
        results.keep()
        failures += not is_ok(row)
        more = f", {row['weights']} weights, {row['error']:.1e}" if "error" in row else f", {first_line(row.get('why', '-'))}"
        print(f"{place} {key(cell)}: {first_line(row['outcome'])}{more} ({time.process_time() - before:.1f} s)", flush=True)
    missing = [cell for cell in cells() if not is_ok(results.rows.get(key(cell)))]
    if not left_alone(parser, arguments, len(missing), PAGE):
        put("precision", table(results.rows), PAGE)
        print(f"docs/{PAGE.name} is written")
    print(f"{failures} cells are not ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
