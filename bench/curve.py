"""Time over memory: meshc's step under smaller and smaller budgets, from keeping all to whole layers recomputed, with its peers' points.

    python bench/curve.py                  what is not in bench/results/curve.json yet, case by case; two CPU ranks
    python bench/curve.py --eager          without torch.compile and Inductor
    python bench/curve.py --anew           also what is there
    python bench/curve.py --write          and docs/memory-budgets.md carries the curves and what they say

A case is a model, a plan and a mode; all its contenders live in the same two processes, and their steps are interleaved (`measure.py`).
Budgets lie evenly between what is predicted with nothing recomputed and with whole layers. Peers are DDP and FSDP2 as they are, with
`torch.utils.checkpoint` around each layer, and with a policy that keeps products (`checkpointed.py`); compiled they are under
`torch.compile`. Memory is the most bytes of tensors alive at once in a rank's fifth step. Times are medians of the ratios of neighbouring
steps; of CPU time, which leaves out waiting, likewise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from carried import carry
from checkpointed import WAYS
from drawn import Mark, beside, panel
from models import WORKLOADS
from own_process import in_a_process
from peers import ADAMW, AXIS_OF
from report import machine
from run import launch
from tabulate import tabulate

import meshc
from meshc.cost import peak_memory

MODELS = ("llama", "nanogpt")
PLANS = ("ddp", "fsdp")
MODES = ("eager", "compiled")
SHARES = (0.8, 0.6, 0.4, 0.2, 0.0)
"""Of what lies between the ends of a curve: how much of it a budget leaves."""
ENDS = ("none", "layer")
KEPT = Path(__file__).parent / "results" / "curve.json"
TIME, MEMORY = 1.0, 0.9
"""At a peer's memory the step may take so much of its step; at its time a rank may hold so much of its memory."""

Row = dict[str, Any]


def predicted(model: str, plan: str, compiled: bool, policy: str) -> int:
    """Bytes of a rank under a policy. No processes are needed."""
    workload = WORKLOADS[model]
    module = workload.build()
    step = meshc.TrainStep(module, optimizer=torch.optim.AdamW(module.parameters(), **ADAMW), loss=workload.loss)
    mesh, (batch,), backend = meshc.Mesh(f"{AXIS_OF[plan]}=2"), workload.batches(1), "inductor" if compiled else "eager"
    program = meshc.compile(step, mesh, kwargs=batch, plan=plan, backend=backend, options=meshc.Options(remat=policy))
    return peak_memory.peak_rank(program.compiled).total


def contenders(model: str, plan: str, compiled: bool) -> list[Row]:
    most, least = (in_a_process(predicted, model, plan, compiled, policy) for policy in ENDS)
    budgets = [round(least + share * (most - least)) for share in SHARES]
    meshc_s = [{"remat": "none"}, {}, *({"budget": budget} for budget in budgets), {"remat": "layer"}]
    peers = [{}, *({"again": way} for way in WAYS)]
    own = [{"system": "peer", **one} for one in peers] + [{"system": "meshc", **one} for one in meshc_s]
    return [{"system": "single"}, *({**one, "compiled": compiled} for one in own)]


def measured(model: str, plan: str, mode: str, pairs: int) -> list[Row]:
    """Of one case. Raises RuntimeError where the ranks ended, with what they printed."""
    asked = contenders(model, plan, mode == MODES[1])
    rows, log, status = launch({"model": model, "plan": plan, "pairs": pairs, "contenders": asked})
    if status != 0:
        raise RuntimeError(f"{model}, {plan}, {mode}: the ranks ended\n{log}")
    return rows[1:]


# ------------------------------------------------------------------------------------------------------------------------ what it says


def ratio(row: Row, base: Row, figure: str = "step_s") -> float:
    return statistics.median(mine / its for mine, its in zip(row[figure], base[figure], strict=True))


@dataclass(frozen=True)
class Against:
    """A peer's point beside the curve. `name`: of model, plan and mode."""

    name: tuple[str, str, str]
    peer: Row
    curve: list[Row]

    @cached_property
    def fastest(self) -> Row | None:
        """Of what holds no more than the peer."""
        held = [row for row in self.curve if row["peak_bytes_per_rank"] <= self.peer["peak_bytes_per_rank"]]
        return min(held, key=lambda row: ratio(row, self.peer), default=None)

    @cached_property
    def smallest(self) -> Row | None:
        """Of what takes no longer than the peer."""
        soon = [row for row in self.curve if ratio(row, self.peer) <= TIME]
        return min(soon, key=lambda row: row["peak_bytes_per_rank"], default=None)

    def cells(self) -> list[object]:
        """A line of the table, with what holds of what is wanted."""
        peer, fast, small = self.peer, self.fastest, self.smallest
        time = None if fast is None else ratio(fast, peer)
        share = None if small is None else small["peak_bytes_per_rank"] / peer["peak_bytes_per_rank"]
        said = [title(peer), mib(peer), *((None, None, None) if fast is None else (title(fast), time, ratio(fast, peer, "cpu_s")))]
        said += [holds(time, TIME), *((None, None) if small is None else (title(small), share)), holds(share, MEMORY)]
        return [*self.name, *said]


def holds(value: float | None, bar: float) -> str:
    return "no: nothing" if value is None else "yes" if round(value, 3) <= bar else "no"


def mib(row: Row) -> float:
    return row["peak_bytes_per_rank"] / 2**20


def title(row: Row) -> str:
    """In few words: a peer's way, or what meshc was asked for."""
    if row["system"] == "peer":
        return row["title"].partition(",")[0] + (f", {row['again']}" if row["again"] else "")
    return row["remat"] or (f"{row['budget'] / 2**20:.1f} MiB" if row["budget"] else "default")


def parted(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Peers, and meshc's curve, of those that ran."""
    ran = [row for row in rows if not row["problem"] and row["step_s"]]
    return [row for row in ran if row["system"] == "peer"], [row for row in ran if row["system"] == "meshc"]


MARKS = {None: "D", "layer": "L", "selective": "S"}
"""Of peers: as they are, and by what they recompute."""


def drawing(rows: list[Row], name: str) -> list[str]:
    """Time, of the step that recomputes nothing, over memory. `o`: meshc."""
    peers, curve = parted(rows)
    base = next(row for row in curve if row["remat"] == ENDS[0])
    points = [Mark(mib(row), ratio(row, base), "o" if row in curve else MARKS[row["again"]]) for row in (*curve, *peers)]
    return panel(points, name, across="MiB", up="of none")


def shown(kept: dict[str, list[Row]]) -> str:
    there = [(model, plan, mode) for mode in MODES for model in MODELS for plan in PLANS if " ".join((model, plan, mode)) in kept]
    lines, against, panels = [], [], {}
    for name in there:
        rows = kept[" ".join(name)]
        peers, curve = parted(rows)
        base = next(row for row in curve if row["remat"] == ENDS[0])
        for row in (*curve, *peers):
            predicted_mib = row["predicted_bytes_per_rank"] and row["predicted_bytes_per_rank"] / 2**20
            lines.append([*name, title(row), predicted_mib, mib(row), ratio(row, base), ratio(row, base, "cpu_s")])
        lines += [[*name, title(row), None, None, None, row["problem"]] for row in rows if row["problem"]]
        against += [Against(name, peer, curve).cells() for peer in peers]
        panels[name] = drawing(rows, ", ".join(name))
    bands = dict.fromkeys((model, mode) for model, _, mode in there)
    pictures = [beside([panels[name] for name in there if (name[0], name[2]) == band]) for band in bands]
    heads = ("model", "plan", "mode", "peer", "MiB", "fastest that holds no more", "step of it", "CPU", f"<= {TIME}")
    heads += ("smallest that is no slower", "MiB of it", f"<= {MEMORY}")
    first = tabulate(against, heads, tablefmt="github", floatfmt=("", "", "", "", ".1f", "", ".3f", ".3f", "", "", ".3f"))
    heads = ("model", "plan", "mode", "what", "predicted MiB", "held MiB", "step of `none`", "CPU of it")
    second = tabulate(lines, heads, tablefmt="github", floatfmt=("", "", "", "", ".1f", ".1f", ".3f", ".3f"))
    text = "\n\n".join(pictures)
    drawn = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    return f"{drawn}\n\n{first}\n\n{second}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--pairs", type=int, default=25, help="interleaved timed steps of each contender")
    parser.add_argument("--eager", action="store_true", help="leave out what compilers take")
    parser.add_argument("--anew", action="store_true", help="also what is there")
    parser.add_argument("--write", action="store_true", help="docs/memory-budgets.md carries all that is there")
    options = parser.parse_args()
    kept: dict[str, list[Row]] = json.loads(KEPT.read_text())["cases"] if KEPT.exists() else {}
    for mode in MODES[:1] if options.eager else MODES:
        for model in options.models:
            for plan in options.plans:
                name = " ".join((model, plan, mode))
                if name in kept and not options.anew:
                    continue
                print(f"measuring {name} ...", file=sys.stderr, flush=True)
                kept[name] = measured(model, plan, mode, options.pairs)
                KEPT.write_text(json.dumps({"machine": machine(), "cases": kept}, indent=1) + "\n")
    print(shown(kept))
    if options.write:
        carry("memory-budgets.md", "bench/curve.py", shown(kept))


if __name__ == "__main__":
    from transformers.models.llama import modeling_llama  # noqa: F401  # before processes are forked

    main()
