"""`meshc doctor`: checks of this machine and environment, with what to do about each fault.

    works  torch            2.11.0+cpu
    note   random numbers   no C++ compiler: they are drawn in plain torch
           what to do: install a C++ compiler (g++ or clang++, or name one in $CXX)
    fails  gloo             2 of 2 processes had no sum after 120 s
           what to do: ...
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
import torch.distributed as dist

from meshc import environment, package, private, program_cache, replacements
from meshc.commands.target import harmless
from meshc.cost import devices
from meshc.errors import ArtifactError, MeshcError, PlanError
from meshc.files import private_folders
from meshc.ops import philox
from meshc.report.tables import bytes_text
from meshc.runtime.comm import connectivity

WORKS: Final = "works"
NOTE: Final = "note"
FAILS: Final = "fails"
PYTHON: Final = (3, 10)
WHAT_TO_DO: Final = {
    "gloo": "let processes of this machine connect to each other: a hostname that resolves to it, a network device that is up "
    "(GLOO_SOCKET_IFNAME names one); --timeout gives them longer",
    "nccl": "NCCL_DEBUG=INFO says more; driver and torch have to fit; --timeout gives it longer",
}
"""Where processes do not reach each other."""


@dataclass(frozen=True)
class Finding:
    """`state`: it works; it is missing or slower, and nothing that meshc needs; it fails, and meshc needs it. `todo`: what to do."""

    what: str
    state: str
    said: str
    todo: str = ""


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="the same as JSON")
    command.add_argument("--timeout", metavar="SECONDS", type=float, default=120.0, help="for processes to reach each other; default: 120")


def run(options: argparse.Namespace) -> None:
    found: list[Finding] = []
    for one in findings(options.timeout):
        found.append(one)
        if not options.json:
            print(harmless(_line(one)), flush=True)
    failed = [one.what for one in found if one.state == FAILS]
    if options.json:
        print(json.dumps({"works": not failed, "findings": [asdict(one) for one in found]}, indent=1))
    if failed:
        raise MeshcError(f"what meshc needs does not work here: {', '.join(failed)}")


def findings(timeout_s: float) -> Iterator[Finding]:
    """All findings, as each check ends."""
    for check in (_python, _torch, _meshc, _transformers, _processors, _random_numbers, _environment):
        yield check()
    yield from _gpus()
    yield _calibration()
    yield _program_cache()
    yield _all_reduce("gloo", 2, dist.is_available() and dist.is_gloo_available(), timeout_s)
    if torch.cuda.is_available():
        ranks = min(2, torch.cuda.device_count())
        yield _all_reduce("nccl", ranks, dist.is_available() and dist.is_nccl_available(), timeout_s)


def _line(one: Finding) -> str:
    return f"{one.state:<6} {one.what:<16} {one.said}" + (f"\n{'':<6} what to do: {one.todo}" if one.todo else "")


# ------------------------------------------------------------------------------------------------------------------------- versions


def _python() -> Finding:
    said = f"{platform.python_version()}, {sys.executable}, {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON:
        return Finding("python", FAILS, said, "use Python {}.{} or newer".format(*PYTHON))
    return Finding("python", WORKS, said)


def _torch() -> Finding:
    """With every private name that meshc uses of it."""
    missing = _missing((*private.NAMES.values(), *private.REACHED, *replacements.places_of("torch")))
    said = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
    if missing:
        return Finding("torch", FAILS, f"{said}: it lacks {', '.join(missing)}", f"install torch {private.SUPPORTED['torch']}")
    return Finding("torch", WORKS, said)


def _missing(places: tuple[str, ...]) -> list[str]:
    found = []
    for place in places:
        try:
            private.resolve_name(place)
        except private.UnsupportedTorch:
            found.append(place.replace(":", "."))
    return found


def _meshc() -> Finding:
    return Finding("meshc", WORKS, f"{package.__version__}, {package.FOLDER}")


def _transformers() -> Finding:
    supported = private.SUPPORTED["transformers"]
    try:
        said = version("transformers")
    except PackageNotFoundError:
        return Finding("transformers", NOTE, "not installed", f"nothing, unless your models are stock ones: they need {supported}")
    missing = _missing((*private.OF_TRANSFORMERS, *replacements.places_of("transformers")))
    if missing:
        return Finding("transformers", NOTE, f"{said}: it lacks {', '.join(missing)}", f"for stock models install transformers {supported}")
    return Finding("transformers", WORKS, said)


# --------------------------------------------------------------------------------------------------------------------------- machine


def _processors() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = f"{cores} core{'s' * (cores > 1)} for this process, {bytes_text(memory)} of memory, {torch.get_num_threads()} threads of torch"
    return Finding("processors", WORKS, said)


def _random_numbers() -> Finding:
    """The kernel is built if need be, as the first program with dropout would."""
    compiler = philox.compiler()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built = philox.library() is not None
    told = [str(one.message) for one in caught]
    if not built:
        why = f"{compiler} does not build the kernel" if compiler else "no C++ compiler"
        todo = "install a C++ compiler (g++ or clang++, or name one in $CXX); CUDA needs triton instead"
        return Finding("random numbers", NOTE, f"{why}: on the CPU they are drawn in plain torch, the same and 30 times as slowly", todo)
    if told:
        return Finding("random numbers", NOTE, told[0].partition("\n")[0], "docs/environment.md, MESHC_CACHE")
    return Finding("random numbers", WORKS, f"the kernel is built, by {compiler}" if compiler else "the kernel is built")


def _environment() -> Finding:
    said = environment.meshc_variables()
    unknown = [name for name in said if name not in environment.KNOWN]
    shown = ", ".join(f"{name}={value}" for name, value in said.items()) or "no MESHC_* is set"
    try:
        environment.log_level(), environment.verifying()
    except PlanError as error:
        return Finding("environment", FAILS, str(error), "docs/environment.md has what each may be")
    if unknown:
        return Finding("environment", NOTE, f"{shown}; nothing reads {', '.join(unknown)}", "docs/environment.md has the names")
    return Finding("environment", WORKS, shown)


def _gpus() -> Iterator[Finding]:
    """Findings for each GPU, and for the links between GPUs."""
    if not torch.cuda.is_available():
        there = shutil.which("nvidia-smi") is not None and bool(_command_output("nvidia-smi", "-L"))
        if there:
            said = f"there are some, and torch {torch.__version__} cannot use them"
            yield Finding("GPUs", NOTE, said, "install a torch for this machine's driver, and look at $CUDA_VISIBLE_DEVICES")
        else:
            yield Finding("GPUs", WORKS, "none: ranks are processes on the CPU")
        return
    count = torch.cuda.device_count()
    for number in range(count):
        one = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", WORKS, f"{one.name}, {bytes_text(one.total_memory)}, capability {one.major}.{one.minor}")
    if count > 1:
        apart = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not torch.cuda.can_device_access_peer(a, b)]
        said = links(_command_output("nvidia-smi", "topo", "-m")) or "not known"
        if apart:
            todo = "nothing where they are meant to go through the host; else look at `nvidia-smi topo -m`"
            yield Finding("links", NOTE, f"{said}; these do not reach each other's memory: {', '.join(apart)}", todo)
        else:
            yield Finding("links", WORKS, said)


def links(table: str) -> str:
    """Of what `nvidia-smi topo -m` prints how many pairs of GPUs have which link: `28 x NV18`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", table).splitlines() if re.match(r"\s*(\x1b\[[\d;]*m)?GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row[1:]]
    pairs = [row[1 + other] for at, row in enumerate(rows) for other in range(at + 1, len(rows))]
    return ", ".join(f"{pairs.count(kind)} x {kind}" for kind in sorted(set(pairs)))


def _command_output(*words: str) -> str:
    """Output of a command; "" if it fails or times out."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _calibration() -> Finding:
    """Whether predicted times are of this machine."""
    file = environment.device_file()
    try:
        measured = devices.calibrated_devices()
    except ArtifactError as error:
        return Finding("predictions", FAILS, str(error).partition("\n")[0], "delete the file, and `meshc calibrate` writes it anew")
    name = devices.name_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    if name not in measured:
        others = f"; {file} has {', '.join(measured)}" if measured else ""
        told = f"{name} is not measured: times are those of the table{others}"
        return Finding("predictions", NOTE, told, "`meshc calibrate`, under torchrun for the links too")
    return Finding("predictions", WORKS, f"{name} is measured: {file}")


def _program_cache() -> Finding:
    """Programs that earlier starts have left on disk."""
    folder = environment.programs_folder()
    place = folder or program_cache.default_folder()
    found, why = program_cache.size(place), private_folders.refusal(place) if place.is_dir() else None
    many = f"{found.programs} program{'s' * (found.programs != 1)}, {bytes_text(found.bytes)}, of {bytes_text(program_cache.MOST)} at most"
    said = f"{place}: {many}" if found.programs else f"{place}: empty"
    if why is not None:
        return Finding("kept programs", NOTE, f"{place} is not used: {why}", "give it to this user alone: chmod 700, or name another")
    if folder is None:
        said += f"; kept only where Options(cache=) asks for it, {environment.PROGRAMS} is not set"
    return Finding("kept programs", WORKS, said)


def _all_reduce(
    backend: str,
    ranks: int,
    there: bool,
    timeout_s: float,
    trial: Callable[..., connectivity.ConnectivityResult] = connectivity.check_connectivity,
) -> Finding:
    """Result of a real all-reduce between newly started processes."""
    if not there:
        return Finding(backend, FAILS, "this torch is built without it", "install a torch with torch.distributed and " + backend)
    found = trial(backend, ranks, timeout_s, environment.without_launcher())
    who = f"{ranks} processes" if ranks > 1 else "a process"
    if found.has_succeeded:
        return Finding(backend, WORKS, f"{who} of this machine added up their numbers, {found.seconds:.1f} s with starting them")
    return Finding(backend, FAILS, f"{who} of this machine have no sum: {found.said}", WHAT_TO_DO[backend])
