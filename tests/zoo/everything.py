"""All that transformers lists for four tasks (`listed.py`), each as a training step on simulated ranks beside one device; and its table.

    python -m tests.zoo.everything [--only causal,"image vit"] [--limit-seconds T] [--fresh] [--write]

Each is tried in a process of its own, for SECONDS at most. Rows are kept in out/zoo-all.json, so that a run that was stopped goes on
where it was; `--only` names tasks or single types and runs them again in any case, and leaves the table alone, as a run does that was
stopped. `--write`: the table is of what is there, and says how much that is.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from meshc.errors import CompilerFault, MeshcError, VerifyError
from tests.captured import Captured
from tests.coverage_page import left_alone, put
from tests.results import Results
from tests.table_command import command, in_time
from tests.zoo.listed import TASKS, Listed, NotBuilt, case, listed
from tests.zoo.run import adamw, first_line

MESH: Final = "dp=2,tp=2"
SECONDS: Final = 150
BYTES: Final = 8 << 30
NO_MEMORY: Final = "can't allocate memory"
"""What torch says then."""

OUTCOMES: Final = {
    "equal": "loss, every gradient, and parameters after two steps of AdamW are one device's",
    "refused": "an error of meshc's own, which names the line and says what to do",
    "not equal": "a number differs",
    "failed": "an error that is nobody's",
    "too slow": f"not done within {SECONDS} s of one processor, or {BYTES >> 30} GiB",
    "not built": "transformers does not build or run it from a small configuration, by itself",
}  # fmt: skip


def tried(one: Listed) -> dict[str, Any]:
    """Its row. Errors are results."""
    warnings.simplefilter("ignore")
    before = time.process_time()
    try:
        found = Captured(case(one), train=True, double=True)
        found.verify_training(MESH, None, adamw)
        outcome, why = "equal", ""
    except NotBuilt as error:
        outcome, why = "not built", str(error)
    except (AssertionError, VerifyError) as error:
        outcome, why = "not equal", str(error) or "an assertion"
    except CompilerFault as error:
        outcome, why = "failed", str(error)
    except MeshcError as error:
        outcome, why = "refused", str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what came of it
        full = isinstance(error, MemoryError) or NO_MEMORY in str(error)
        outcome, why = "too slow" if full else "failed", f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "why": " ".join(why.split())[:400], "seconds": round(time.process_time() - before, 1)}


def in_a_child(one: Listed) -> dict[str, Any]:
    """`tried` in a process that ends when its time is up."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(one, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(20 * SECONDS) else _slow()  # by the clock, which others' work makes slow
    except EOFError:  # killed: of processor time, or memory
        return _slow()
    finally:
        child.kill()
        child.join()


def _child(one: Listed, answers: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 30, SECONDS + 40))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    answers.send(tried(one))


def _slow() -> dict[str, Any]:
    return {"outcome": "too slow", "why": "it was ended", "seconds": float(SECONDS)}


def table(rows: Mapping[str, Mapping[str, Any]], entries: Sequence[Listed]) -> str:
    """The section: counts by task and outcome, then each that is not equal, with its reason."""
    known = [(one, rows[one.key]) for one in entries if one.key in rows]
    counts = Counter((one.task, row["outcome"]) for one, row in known)
    lines = [
        "## All that transformers lists",
        "",
        "Written by `make zoo-all` (`python -m tests.zoo.everything`): each model type that the installed transformers lists for causal,",
        "masked and sequence-to-sequence language models and for image classification, shrunk from its own configuration as far as it",
        f"builds (`tests/zoo/listed.py`); a training step with AdamW on simulated `{MESH}`, in float64, beside one device.",
        f"{len(known)} of {len(entries)} were tried.",
        "",
        f"| | {' | '.join(TASKS)} | all | |",
        f"|---|{'---|' * len(TASKS)}---|---|",
    ]
    for outcome, meaning in OUTCOMES.items():
        row = [counts[task, outcome] for task in TASKS]
        lines.append(f"| {outcome} | {' | '.join(map(str, row))} | {sum(row)} | {meaning} |")
    for outcome in list(OUTCOMES)[1:]:
        found = [f"- {one.key}: {first_line(row['why'] or '-')}" for one, row in known if row["outcome"] == outcome]
        lines += ["", f"{outcome.capitalize()}:", "", *found] if found else []
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = command("tests.zoo.everything", __doc__, "models")
    parser.add_argument("--only", default="", help="tasks, or a task and a type (`image vit`), joined by commas")
    parser.add_argument("--write", action="store_true", help="the table is of what is there so far")
    arguments = parser.parse_args()
    only = [part.strip() for part in arguments.only.split(",") if part.strip()]
    entries = listed()
    unknown = sorted(set(only) - {*TASKS, *(one.key for one in entries)})
    if unknown:
        parser.error(f"transformers lists no {', '.join(unknown)}")
    results = Results("zoo-all", arguments.fresh)
    rows = results.rows
    chosen = [one for one in entries if one.key in only or one.task in only] if only else entries
    work = [one for one in chosen if only or one.key not in rows]
    for place, one in in_time(work, arguments.limit_seconds, "models"):
        row = rows[one.key] = in_a_child(one)
        results.keep()
        print(f"{place} {one.key}: {row['outcome']}{': ' + row['why'][:200] if row['why'] else ''} ({row['seconds']} s)", flush=True)
    missing = [one for one in entries if one.key not in rows]
    if arguments.write or not left_alone(parser, arguments, len(missing)):
        put("zoo-all", table(rows, entries))
        print("docs/coverage.md is written")
    bad = [key for key, row in rows.items() if row["outcome"] in ("not equal", "failed")]
    print(f"{len(bad)} are neither equal nor refused")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
