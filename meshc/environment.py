"""Settings from environment variables, which no other file reads.

    MESHC_DUMP=dir      write the program's text after each pass into dir, numbered (meshc.passes.dump)
    MESHC_VERIFY=1      prove the program after each pass, and name the pass that broke it; `values` simulates all ranks instead
    MESHC_LOG=info      print what each pass took and noted; `debug` also what it left, and tracebacks on the command line
    MESHC_DEVICES=file  where `meshc calibrate` writes what it measures, and the cost model looks for it
    MESHC_TRACE=file    what each rank did when, written by rank 0 after each call (meshc.runtime.run.recorder)
    MESHC_PROGRAMS=dir  where compiled programs are kept for a next start, unless Options(cache=) says otherwise (meshc.program_cache)
    MESHC_DISK=dir      where state lies that a plan keeps on the disk (meshc.runtime.comm.disk)
    MESHC_CACHE=dir     where compiled kernels are kept, and with Options(cache=True) programs (meshc.files.kernel_cache)
    CXX                 the C++ compiler that builds the kernel of random numbers on a CPU (meshc.ops.philox)
    WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE    set by the launcher; `meshc run` and `meshc calibrate` read them
    TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_USE_AGENT_STORE, GROUP_WORLD_SIZE    likewise (meshc.runtime.failure.failed_rank)

Variables that a model's code reads (meshc.frontend.dependencies), and those of others that ranks compare
(meshc.runtime.agreement.descriptions), are read by `variable`.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from meshc.errors import PlanError

DUMP: Final = "MESHC_DUMP"
VERIFY: Final = "MESHC_VERIFY"
LOG: Final = "MESHC_LOG"
DEVICES: Final = "MESHC_DEVICES"
TRACE: Final = "MESHC_TRACE"
DISK: Final = "MESHC_DISK"
PROGRAMS: Final = "MESHC_PROGRAMS"
CACHE: Final = "MESHC_CACHE"
KNOWN: Final = (DUMP, VERIFY, LOG, DEVICES, TRACE, DISK, PROGRAMS, CACHE)
LEVELS: Final = ("", "info", "debug")

_traced: Final[Counter[Path]] = Counter()
"""Calls of this process traced so far, by file."""


def meshc_variables() -> dict[str, str]:
    """Environment variables whose names begin with MESHC_, sorted."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MESHC_")}


def variable(name: str) -> str:
    """The value of a variable that others define, or `not set`."""
    return os.environ.get(name, "not set")


def dump_folder() -> Path | None:
    """Where the text after each pass is written. None: nowhere."""
    return _path(DUMP)


def disk_folder() -> Path:
    """Where state lies that a plan keeps on the disk; without a word where temporary files do."""
    return Path(os.environ.get(DISK, "") or tempfile.gettempdir())


def programs_folder() -> Path | None:
    """Where compiled programs are kept for a next start. None: nowhere."""
    return _path(PROGRAMS)


def cache_folder() -> Path:
    """Where what can be built again is kept: $MESHC_CACHE, or ~/.cache/meshc."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "meshc")


def verifying() -> str:
    """How the program is verified after each pass: `proof`, `values`, or not at all."""
    value = _word(VERIFY)
    if value not in ("", "0", "1", "values"):
        raise PlanError(f"{VERIFY}={value} is not known: use 1 or values, or leave it out")
    return "proof" if value == "1" else value.strip("0")


def watching() -> bool:
    """Whether anything is to be done after each pass: a log, a dump, a check."""
    return bool(log_level()) or dump_folder() is not None or bool(verifying())


def log_level() -> str:
    """`info`, `debug`, or nothing."""
    level = _word(LOG)
    if level not in LEVELS:
        raise PlanError(f"{LOG}={level} is not known: use info or debug")
    return level


def debugging() -> bool:
    """Whether the command line shows tracebacks."""
    return _word(LOG) == "debug"


def world_size() -> int:
    """How many ranks the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of the launcher's ranks this process is; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which of the machine's devices this process takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many ranks the launcher started on this machine; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restart_count() -> str:
    """Number of times that the launcher has restarted this job, as text; 0 without one."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def agent_serves_store() -> bool:
    """Whether the launcher's agent serves the process group's store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_count() -> str:
    """Number of the launcher's agents, one a node, as text; 1 without one."""
    return os.environ.get("GROUP_WORLD_SIZE", "1")


def without_launcher() -> dict[str, str]:
    """The environment of a process that no launcher has started."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launcher}


def compiler_name() -> str | None:
    """The C++ compiler that $CXX names."""
    return os.environ.get("CXX")


def device_file() -> Path:
    """This user's measured devices, whether or not there are any: $MESHC_DEVICES, or meshc/devices.toml where settings lie."""
    settings = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get(DEVICES) or Path(settings) / "meshc" / "devices.toml")


def trace_file() -> Path | None:
    """Where a trace of each call is written; `{call}` in it stands for the call's number. None: nothing is recorded."""
    return _path(TRACE)


def next_trace(file: Path) -> int:
    """The number of the next call of this process whose trace goes there, from 0."""
    _traced[file] += 1
    return _traced[file] - 1


def _path(name: str) -> Path | None:
    value = os.environ.get(name, "")
    return Path(value) if value else None


def _word(name: str) -> str:
    return os.environ.get(name, "").strip().lower()
