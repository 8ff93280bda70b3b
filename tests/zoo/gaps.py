"""How far from the best a searched plan can be: the zoo's transformers, two layers each; docs/planner-figures.md has the table.

    python -m tests.zoo.gaps [--only llama,gpt2] [--mesh dp=8,tp=8] [--limit-seconds T] [--fresh]

The zoo's models are small: sixteen times its batch is priced on an h100 that computes, keeps and sends so many times slower (SLOWER), with
latencies as they are, so that sizes count as they do in a large model. Cells are kept in out/gaps.json, so that a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CPU seconds of idle threads are no one's

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from meshc.cost.devices import Device, Link, device  # noqa: E402
from meshc.ir.mesh import Mesh  # noqa: E402
from meshc.optimizer.optimizer import describe  # noqa: E402
from meshc.passes import pipeline
from meshc.passes.driver import compile_program as driver  # noqa: E402
from meshc.passes.pass_runner import run_pass  # noqa: E402
from meshc.passes.planner.plan_search import PlanSearch  # noqa: E402
from tests.captured import Captured  # noqa: E402
from tests.coverage_page import PAGE, left_alone, put  # noqa: E402
from tests.results import Results  # noqa: E402
from tests.table_command import command, in_time  # noqa: E402
from tests.zoo.families import BATCH  # noqa: E402
from tests.zoo.run import case, first_line  # noqa: E402
from tests.zoo.stock import STOCK  # noqa: E402

MESHES: Final = ("dp=2,tp=2", "dp=8,tp=8", "dp=2,dp_shard=8,tp=8")
NO_TRANSFORMERS: Final = ("convnext", "mamba", "resnet_stock", "wav2vec2")
NAMES: Final = tuple(name for name in STOCK if name not in NO_TRANSFORMERS)
TIMES: Final = 16
SLOWER: Final = 2.0**12


def slow() -> Device:
    found = device("h100")
    links = (Link(link.latency_s, link.bandwidth_Bps / SLOWER) for link in (found.inside_node, found.between_nodes))
    inside, between = links
    rates = {dtype: rate / SLOWER for dtype, rate in found.flops_per_s.items()}
    return replace(found, flops_per_s=rates, memory_Bps=found.memory_Bps / SLOWER, inside_node=inside, between_nodes=between)


def family(name: str) -> Captured:
    """With sixteen times its batch."""
    found = case(name)
    return Captured(replace(found, kwargs={key: _repeated(value) for key, value in found.kwargs.items()}), train=True, double=False)


def _repeated(value: object) -> object:
    if isinstance(value, Tensor) and value.dim() and len(value) == BATCH:
        return torch.cat([value] * TIMES)
    return value


def measured(captured: Captured, mesh: str) -> dict[str, Any]:
    optimizer = describe(torch.optim.AdamW(captured.reference.module.parameters()))
    plan = "\n".join(f"{axis.name}: auto" for axis in Mesh(mesh).axes)
    asked = replace(captured.request, mesh=Mesh(mesh), plan=plan, optimizer=optimizer, clip_grad_norm=1.0)
    placed = run_pass(pipeline.PLACE[0], driver.update_and_factorize(captured.traced.copy_for_request(asked)))
    start = time.process_time()
    (found,) = PlanSearch(placed, slow()).find_choices()
    return {"gap": float(found.certificate.gap), "seconds": time.process_time() - start}


def table(rows: dict[str, Any]) -> str:
    gaps = [row["gap"] for row in rows.values() if "gap" in row]
    head = [
        "## Gaps of the search",
        "",
        "Written by `python -m tests.zoo.gaps`: the zoo's transformers, two layers each, a training step with AdamW and clipping; all axes",
        "open. How much faster a plan of the model could be at most than what is found, and CPU seconds of the search (model and",
        f"solution); {sum(gap > 0.01 for gap in gaps)} of {len(gaps)} gaps are above 1 %.",
        "",
        f"| model | {' | '.join(f'`{mesh}`' for mesh in MESHES)} |",
        f"|---|{'---|' * len(MESHES)}",
    ]
    body = [f"| {name} | {' | '.join(_cell(rows.get(key(name, mesh))) for mesh in MESHES)} |" for name in NAMES]
    return "\n".join([*head, *body]) + "\n"


def key(name: str, mesh: str) -> str:
    return f"{name} {mesh}"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if "error" in row:
        return str(row["error"])
    return f"{row['gap']:.2%}, {row['seconds']:.1f} s"


def main() -> int:
    parser = command("tests.zoo.gaps", __doc__)
    parser.add_argument("--only", default="", help="families, joined by commas")
    parser.add_argument("--mesh", default="", help="one mesh of the table")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results = Results("gaps", arguments.fresh)
    only = arguments.only.split(",") if arguments.only else []
    meshes = [mesh for mesh in MESHES if arguments.mesh in ("", mesh)]
    work = [(name, mesh) for name in only or NAMES for mesh in meshes if only or key(name, mesh) not in results.rows]
    captured = lru_cache(maxsize=1)(family)
    for place, (name, mesh) in in_time(work, arguments.limit_seconds):
        try:
            row = measured(captured(name), mesh)
        except Exception as error:  # an entry of the table: the other rows are worth having
            row = {"error": first_line(f"{type(error).__name__}: {error}")}
        results.rows[key(name, mesh)] = row
        results.keep()
        print(place, name, mesh, _cell(row), flush=True)
    missing = sum(key(name, mesh) not in results.rows for name in NAMES for mesh in MESHES)
    if not left_alone(parser, arguments, missing):
        put("gaps", table(results.rows), PAGE.with_name("planner-figures.md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
