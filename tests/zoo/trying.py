"""Models of others, each as a training step on simulated ranks beside one device: what came of it, and the table of many.

Each is tried in a process of its own, for SECONDS at most. Rows are kept in out/NAME.json, so that a run that was stopped goes on where it
was; `--only` names groups or single models and runs them again in any case, and leaves the table alone, as a run does that was stopped.
`--write`: the table is of what is there, and says how much that is.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from meshc.errors import CompilerFault, MeshcError, VerifyError
from tests.captured import Captured
from tests.coverage_page import left_alone, put
from tests.models import Case
from tests.results import Results
from tests.table_command import command, in_time
from tests.zoo.run import adamw, first_line

MESH: Final = "dp=2,tp=2"
SECONDS: Final = 150
BYTES: Final = 12 << 30
NO_MEMORY: Final = "can't allocate memory"
"""What torch says then."""

OUTCOMES: Final = {
    "equal": "loss, every gradient, and parameters after two steps of AdamW are one device's",
    "refused": "an error of meshc's own, which names the line and says what to do",
    "not equal": "a number differs",
    "failed": "an error that is nobody's",
    "too slow": f"not done within {SECONDS} s of one processor, or {BYTES >> 30} GiB",
    "not built": "the library does not build or run it from a small configuration, by itself",
}  # fmt: skip


class NotBuilt(Exception):
    """A model that does not run by itself; what it came to."""


@dataclass(frozen=True)
class Trial:
    """A model of a group (a task, a library), and what builds it. `key`: of its row."""

    group: str
    name: str
    build: Callable[[], Case]

    @property
    def key(self) -> str:
        return f"{self.group} {self.name}"


@dataclass(frozen=True)
class Section:
    """A table of the page: its name there and in out/, its title, what was tried, in words, and what stands at the heads of groups."""

    name: str
    title: str
    text: str
    trials: Sequence[Trial]
    heads: Mapping[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(one.group for one in self.trials))


def tried(one: Trial) -> dict[str, Any]:
    """Its row. Errors are results."""
    warnings.simplefilter("ignore")
    before = time.process_time()
    try:
        found = Captured(one.build(), train=True, double=True)
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
    return {"outcome": outcome, "why": " ".join(why.split())[:2000], "seconds": round(time.process_time() - before, 1)}


def in_a_child(one: Trial) -> dict[str, Any]:
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


def _child(one: Trial, answers: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 30, SECONDS + 40))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    answers.send(tried(one))


def _slow() -> dict[str, Any]:
    return {"outcome": "too slow", "why": "it was ended", "seconds": float(SECONDS)}


def says_all(why: str) -> bool:
    """Whether a refusal names a line of code and says what to do."""
    return re.search(r"\w\.py:\d+", why) is not None and "what to do:" in why


def table(rows: Mapping[str, Mapping[str, Any]], section: Section) -> str:
    """Counts by group and outcome, then each that is not equal, with its reason."""
    known = [(one, rows[one.key]) for one in section.trials if one.key in rows]
    counts = Counter((one.group, row["outcome"]) for one, row in known)
    refusals = [row["why"] for _, row in known if row["outcome"] == "refused"]
    clear = sum(map(says_all, refusals))
    heads = [section.heads.get(group, group) for group in section.groups]
    lines = [
        f"## {section.title}",
        "",
        section.text.rstrip("\n"),
        f"{len(known)} of {len(section.trials)} were tried. Of {len(refusals)} refusals {clear} name a line and say what to do.",
        "",
        f"| | {' | '.join(heads)} | all | |",
        f"|---|{'---|' * len(heads)}---|---|",
    ]
    for outcome, meaning in OUTCOMES.items():
        row = [counts[group, outcome] for group in section.groups]
        lines.append(f"| {outcome} | {' | '.join(map(str, row))} | {sum(row)} | {meaning} |")
    for outcome in list(OUTCOMES)[1:]:
        found = [f"- {one.key}: {first_line(row['why'] or '-')}" for one, row in known if row["outcome"] == outcome]
        lines += ["", f"{outcome.capitalize()}:", "", *found] if found else []
    return "\n".join(lines) + "\n"


def run(module: str, doc: str | None, section: Section) -> int:
    """The command of a section, to its exit status: 1 where a row is wrong, or nobody's error."""
    parser = command(module, doc, "models")
    parser.add_argument("--only", default="", help="groups, or single models (`GROUP NAME`), joined by commas")
    parser.add_argument("--write", action="store_true", help="the table is of what is there so far")
    arguments = parser.parse_args()
    only = [part.strip() for part in arguments.only.split(",") if part.strip()]
    unknown = sorted(set(only) - {*section.groups, *(one.key for one in section.trials)})
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    results = Results(section.name, arguments.fresh)
    rows = results.rows
    chosen = [one for one in section.trials if one.key in only or one.group in only] if only else section.trials
    work = [one for one in chosen if only or one.key not in rows]
    for place, one in in_time(work, arguments.limit_seconds, "models"):
        row = rows[one.key] = in_a_child(one)
        results.keep()
        print(f"{place} {one.key}: {row['outcome']}{': ' + row['why'][:200] if row['why'] else ''} ({row['seconds']} s)", flush=True)
    missing = [one for one in section.trials if one.key not in rows]
    if arguments.write or not left_alone(parser, arguments, len(missing)):
        put(section.name, table(rows, section))
        print("docs/coverage.md is written")
    bad = [one.key for one in section.trials if rows.get(one.key, {}).get("outcome") in ("not equal", "failed")]
    print(f"{len(bad)} are neither equal nor refused")
    return 1 if bad else 0
