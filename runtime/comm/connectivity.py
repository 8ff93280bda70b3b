"""Connectivity check of gloo or NCCL on this machine: one all-reduce between processes started for it.

    rank 0  1 --.           run by `meshc doctor` for gloo, and for NCCL where there are GPUs; the processes run this
    rank 1  2 --+--> 3      file as a script, which therefore imports nothing of meshc
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ConnectivityResult:
    """`said`: the last message of the first process that failed; "" if all have the right sum. `seconds`: start of processes included."""

    said: str
    seconds: float

    @property
    def has_succeeded(self) -> bool:
        return not self.said


def check_connectivity(
    backend: str, ranks: int = 2, timeout_s: float = 120.0, variables: Mapping[str, str] | None = None
) -> ConnectivityResult:
    """Runs the check with `ranks` processes over `gloo` or `nccl` (a GPU each), with these environment variables (None: this process's).
    Processes that have not ended by the timeout are killed."""
    source = Path(__file__).read_text()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", source, backend, str(Path(folder) / "store"), str(ranks)]
        outputs = [Path(folder) / f"{rank}.txt" for rank in range(ranks)]
        started = [_start_process([*words, str(rank)], output, variables) for rank, output in enumerate(outputs)]
        try:
            codes = [_code(process, start + timeout_s) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        said = [_last_line(outputs[rank]) or f"rank {rank} ended with code {codes[rank]}" for rank in failed if codes[rank] is not None]
    late = f"{len(failed)} of {ranks} processes had no sum after {timeout_s:g} s" if failed else ""
    return ConnectivityResult(said[0] if said else late, time.monotonic() - start)


def _start_process(words: list[str], output: Path, variables: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def _code(process: subprocess.Popen[bytes], until: float) -> int | None:
    """The exit code of a process; None if it has not ended by the time `until`."""
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _last_line(output: Path) -> str:
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")


def _rank(backend: str, store: str, ranks: int, rank: int) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    number = torch.full((1,), rank + 1.0, device=device)
    dist.all_reduce(number)
    if number.item() != ranks * (ranks + 1) / 2:
        raise ArithmeticError(f"the sum of 1 to {ranks} came out as {number.item()} on rank {rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
