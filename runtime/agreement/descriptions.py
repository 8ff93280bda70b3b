"""Descriptions of what must be equal on all ranks before anything is compiled or sent, as text by field.

    the versions             torch 2.13.0; meshc 0.1.0; python 3.11
    the environment          MESHC_TRACE: set; NCCL_ALGO: not set; ...
    torch's settings         default dtype: torch.float32; deterministic algorithms: False; ...
    the option check_inputs  None
    ...
    inputs                   x float32 [6, 24], target int64 [6]

There is a field for each thing that a user sets, so that a message names it (of a compilation: `meshc.api.job_key`). The compiled program
is compared after compilation.

Left out on purpose, since ranks may differ in them: folders and files (MESHC_DUMP, MESHC_CACHE, MESHC_PROGRAMS, MESHC_DEVICES, the name in
MESHC_TRACE, the option cache), what is logged (MESHC_LOG) or checked (MESHC_VERIFY), numbers of threads, and what names a machine, its
network or its devices.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

import torch
from torch import nn

from meshc import environment
from meshc.package import FOLDER, __version__
from meshc.program.program import PlainProgram as Compiled
from meshc.text import printer

Entries = Iterable[tuple[str, object]]


VARIABLES: Final = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",  # how a device rounds
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE",  # how ranks talk
)  # fmt: skip
"""Environment variables of CUDA and NCCL that alter what a rank computes, or how it sends."""

FOLDERS: Final = ("cache",)
"""Options that are paths, which may differ between machines; that of rank 0 is used."""
INPUTS: Final = "inputs"
VALUES: Final = "what has changed of what the model's code reads"
COMPILED: Final = "the compiled program"
EVALUATION: Final = "the modules in evaluation (training=False)"
FROZEN: Final = "the parameters that take no gradient (requires_grad=False)"
ADVICE: Final[Mapping[str, str]] = {
    EVALUATION: "call model.train() and model.eval() alike on every rank; every rank makes every call, evaluation too",
    FROZEN: "call requires_grad_() alike on every rank, between the same calls",
    "the versions": "install the same versions on every machine",
    "the environment": "set these variables alike on every rank: in the launcher's environment, before it starts",
    "torch's settings": "make the same settings on every rank, before meshc.compile",
    "the registered rules": "call meshc.register_rule alike on every rank, before meshc.compile",
    "the optimizer's numbers": "build the optimizer with the same numbers on every rank",
    "the saved program": "give every rank the same folder, on storage that all share, or the same copy on each machine",
    "the saved state": "give every rank the same state, on storage that all share, or the same copy on each machine",
    INPUTS: (
        "pass the same structure, shapes, dtypes and plain values on every rank: parts of a batch padded to one length "
        '(padding="max_length", or to a\n  multiple that all reach), or the length of the longest part on any rank'
    ),
    VALUES: (
        "change them on every rank, before the same call; what follows from a rank's own data (a loss, a norm) is brought to all first:\n"
        "  torch.distributed.all_reduce, or broadcast"
    ),
    COMPILED: "see what a rank's own code has made different: a branch on the rank, or values that forward reads",
}

_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


def describe_environment() -> dict[str, str]:
    """The fields of every program's environment: versions, environment variables, torch's settings."""
    python = ".".join(platform.python_version_tuple()[:2])
    variables = [(environment.TRACE, "set" if environment.trace_file() else "not set")]
    variables += [(name, environment.variable(name)) for name in VARIABLES]
    return {
        "the versions": f"torch {torch.__version__}; meshc {_own_version()}; python {python}",
        "the environment": entries_text(variables),
        "torch's settings": entries_text(_settings()),
    }


@functools.cache
def _own_version() -> str:
    """meshc's version with a digest of its files, since an edited checkout keeps its version number."""
    digest = hashlib.blake2b(digest_size=4)
    for folder, folders, files in os.walk(FOLDER, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                digest.update(name.encode() + (Path(folder) / name).read_bytes())
    return f"{__version__} (its files: {digest.hexdigest()})"


def _settings() -> list[tuple[str, object]]:
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return [
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device().type),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("float32 precision", torch.backends.fp32_precision),  # type: ignore[attr-defined]
        ("float32 precision of cuda.matmul", cuda.matmul.fp32_precision),
        ("float32 precision of cudnn", cudnn.fp32_precision),
        ("float32 precision of mkldnn.matmul", mkldnn.matmul.fp32_precision),  # type: ignore[attr-defined]
        ("float16 sums in float16", cuda.matmul.allow_fp16_accumulation),
        ("reduced precision of float16 sums", cuda.matmul.allow_fp16_reduced_precision_reduction),
        ("reduced precision of bfloat16 sums", cuda.matmul.allow_bf16_reduced_precision_reduction),
        ("cudnn.deterministic", cudnn.deterministic),
        ("flash attention", cuda.flash_sdp_enabled()),
        ("memory-efficient attention", cuda.mem_efficient_sdp_enabled()),
        ("cudnn attention", cuda.cudnn_sdp_enabled()),
        ("math attention", cuda.math_sdp_enabled()),
    ]


def describe_run(program: Compiled, path: str | Path, state: str | Path | None, given: Mapping[str, object]) -> dict[str, str]:
    """The fields of a `meshc run`. Tensors are compared by the hashes in the tables of the saved program and state."""
    found = {**describe_environment(), COMPILED: printer.hash_program(program), "what the program begins with": stable(program.info)}
    found |= {f"the option {name}": stable(value) for name, value in given.items()}
    return found | {"the saved program": _tables(path), "the saved state": "none" if state is None else _tables(state)}


def _tables(folder: str | Path) -> str:
    """A digest of the tables (manifest, program, state) of a saved folder: its JSON files."""
    return hashlib.blake2b(b"".join(file.read_bytes() for file in sorted(Path(folder).glob("*.json"))), digest_size=16).hexdigest()


def stable(value: object) -> str:
    """A description of a value that is equal in all processes that hold an equal one: no addresses, no hash order."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{stable(k)}: {stable(v)}" for k, v in value.items())) + "}"
    if isinstance(value, AbstractSet):
        return "{" + ", ".join(sorted(map(stable, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(stable, value)) + "]"
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, functools.partial):
        return f"partial of {stable(value.func)} {stable(value.args)} {stable(value.keywords)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({', '.join(f'{f.name}={stable(getattr(value, f.name))}' for f in dataclasses.fields(value))})"
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))


def other_values(mine: str, other: int, theirs: str, alone: bool) -> str:
    """The message for values read by the model's code that have changed differently on another rank. alone: unchanged there."""
    there = "has gone on with what it had before" if alone or not theirs else f"has {theirs}"
    return (
        f"what the model's code reads has changed on this rank and not on rank {other}: {mine or 'nothing'} on this rank, "
        f"rank {other} {there}\n"
        "  why: these values are part of the program, and every rank runs a part of one program\n"
        f"  what to do: {ADVICE[VALUES]}"
    )


def advice(field: str) -> str:
    """The advice of an error about ranks that differ in `field`."""
    return ADVICE.get(field, f"give every rank the same: {field.removeprefix('the option ')}")


def possible_causes(compiled: Compiled, module: nn.Module, read: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    """Possible causes of compiled programs that differ, by field: values that the model's code reads, its config, its printed modules, the
    program's lines."""
    config: object = getattr(module, "config", None)
    written_out = getattr(config, "to_dict", None)
    given = written_out() if written_out is not None else vars(config) if hasattr(config, "__dict__") else {}
    return {
        "what the model's code reads": entries_text(read().items()),
        "the model's config": entries_text((name, stable(value)) for name, value in given.items()),
        "the model's modules": "; ".join(_ADDRESS.sub("", line.strip()) for line in repr(module).splitlines()),
        "the program's lines": "; ".join(line.strip() for line in printer.print_program(compiled, comments=False).splitlines()),
    }


def entries_text(entries: Entries) -> str:
    return "; ".join(f"{name}: {value}" for name, value in entries)
