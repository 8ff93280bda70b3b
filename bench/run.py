"""Trains the same models with meshc and with its peers on two CPU ranks, and prints one table.

    python bench/run.py                                   everything; what is in bench/results/two-cpu-ranks.json is left out
    python bench/run.py --anew                            that too
    python bench/run.py --models llama --plans ddp fsdp   some rows
    python bench/run.py --quick                           Llama, eager, few pairs; nothing is kept

The rows of one model and plan are kept as soon as they are there: a run that was stopped goes on where it was, under the same command.
`bench/README.md` says what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kept import run

HERE = Path(__file__).resolve().parent
RANKS = 2
PLANS = {"llama": 4, "nanogpt": 4, "mlp": 3}  # the first of ALL_PLANS; an MLP has no sequence to split
ALL_PLANS = ("ddp", "fsdp", "megatron", "megatron_sp")


def contenders(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model and plan; the single process comes first, since its losses are the reference."""
    rows: list[dict[str, Any]] = [{"system": "single"}]
    if options.default_adamw:
        rows.append({"system": "peer", "fused": False})
    for compiled in (False,) if options.eager else (False, True):
        if compiled:
            rows.append({"system": "single", "compiled": True})
        for system in ("peer", "meshc"):
            if system in options.systems:
                rows.append({"system": system, "compiled": compiled})
        rows += [{"system": "meshc", "compiled": compiled, "remat": policy} for policy in options.remat]
    return rows


def measure(model: str, plan: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model and plan."""
    return launched(model, plan, contenders(options), options.pairs, options.verbose)


def launched(
    model: str, plan: str, wanted: list[dict[str, Any]], pairs: int, verbose: bool = False, ranks: int = RANKS
) -> list[dict[str, Any]]:
    """A contender that takes the ranks down is a row that says so, and the others run again without it."""
    broken: list[dict[str, Any]] = []
    while True:
        rows, log, status = launch({"model": model, "plan": plan, "pairs": pairs, "contenders": wanted}, ranks)
        if verbose or status != 0:
            print(log, file=sys.stderr, flush=True)
        if status == 0:
            return rows + broken
        if len(rows) < 2 or not rows[-1]["problem"]:
            return [{"title": "all", "system": "", "mode": "", "problem": f"the ranks ended with status {status}"}]
        broken.append(rows[-1])
        del wanted[len(rows) - 1]


def launch(request: dict[str, Any], ranks: int = RANKS) -> tuple[list[dict[str, Any]], str, int]:
    """Runs `measure.py` on all ranks: the rows that it got to, what it printed, its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        out, counter = Path(folder) / "rows.json", Path(folder) / "tensors.so"
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", str(counter), str(HERE / "tensors.cpp"), "-ldl"], check=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(HERE / "measure.py"), json.dumps({**request, "out": str(out)})]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "LD_PRELOAD": str(counter),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return (json.loads(out.read_text()) if out.exists() else []), done.stdout, done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--plans", nargs="+", choices=ALL_PLANS, default=list(ALL_PLANS))
    parser.add_argument("--systems", nargs="+", choices=("peer", "meshc"), default=["peer", "meshc"], help="beside the single process")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved timed steps of each contender")
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile and Inductor, which compile for minutes")
    parser.add_argument("--remat", nargs="+", default=[], help="also meshc under these policies of what backward recomputes")
    parser.add_argument("--default-adamw", action="store_true", help="also peers with AdamW as it is by default, not fused")
    parser.add_argument("--quick", action="store_true", help="Llama, eager, 5 pairs")
    parser.add_argument("--anew", action="store_true", help="also rows that are there")
    parser.add_argument("--name", help="of the files in bench/results/; by default two-cpu-ranks, of rows of both systems and modes")
    parser.add_argument("--verbose", action="store_true", help="print what the ranks print")
    options = parser.parse_args()
    if options.quick:
        options.models, options.eager, options.pairs = ["llama"], True, 5

    usual = not (options.quick or options.eager or options.default_adamw or options.remat) and len(options.systems) == 2
    name = options.name or ("two-cpu-ranks" if usual else None)
    cases = [(model, plan) for model in PLANS for plan in ALL_PLANS[: PLANS[model]]]
    chosen = [(model, plan) for model, plan in cases if model in options.models and plan in options.plans]
    command = " ".join(["python bench/run.py", *(["--name", options.name] if options.name else [])])
    return run(cases, chosen, lambda model, plan: measure(model, plan, options), options.pairs, name, command, options.anew)


if __name__ == "__main__":
    sys.exit(main())
