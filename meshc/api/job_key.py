"""The key of a compilation: all that its program depends on, as one hash, so that another start of the same job finds it on disk.

    what ranks agree on     versions, torch's settings, mesh, plan, options, inputs, the model's state, the optimizer (runtime.agreement)
    what Python is          every attribute, global and line of code that a trace of the model can read (meshc.frontend.reachable)
    where its code stands   file, line and columns of each function: messages and comments name them
    what the passes get     every field of the request: which function is traced, where the model's state lies already
    what else               installed libraries, the table of devices, the machine's GPUs

What cannot be told has no key: a model that something hangs on of which it is not known whether it is the same, code that asks for the time
or for its rank, or that was run without being found from the model. Then nothing is kept, and a note of the program says why.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from meshc import environment
from meshc.frontend.reachable import Reachable
from meshc.frontend.reachable_code import qualified
from meshc.ir.mesh import Mesh
from meshc.passes.phases.request import Request
from meshc.runtime.agreement.agreed import stable

LIBRARIES: Final = ("torch", "numpy", "scipy", "sympy", "triton", "safetensors", "transformers", "peft", "accelerate")
"""Whose files are compared by their versions, or decide something of a program."""
TOLD_OTHERWISE: Final = ("module", "args", "kwargs", "optimizer", "mesh", "plan")
"""Fields of a request that are objects, of which the rest of the key says what they are."""


def key(reached: Reachable, agreed: Mapping[str, str], request: Request) -> str:
    """The key, as 32 hexadecimal digits; whether it is complete `Reachable.why` says, and, behind a trace, `Reachable.beyond`."""
    state = hashlib.blake2b(digest_size=16)

    def take(*words: str) -> None:
        for word in words:
            data = word.encode()
            state.update(len(data).to_bytes(8, "big") + data)

    for field in sorted(agreed):
        take(field, agreed[field])
    for place in sorted(reached.places):
        take(place, reached.places[place])
    for line in sorted(_stands(reached)):
        take(line)
    for one in fields(request):
        if one.name not in TOLD_OTHERWISE:
            take(one.name, stable(getattr(request, one.name)))
    take(*_machine(request.mesh))
    return state.hexdigest()


def _stands(reached: Reachable) -> set[str]:
    """Of each function that was found, where its source is."""
    return {
        f"{code.co_filename}:{code.co_firstlineno} {qualified(code)} {hashlib.blake2b(code.co_linetable, digest_size=8).hexdigest()}"
        for code in reached.code
    }


def _machine(mesh: Mesh) -> list[str]:
    found = [sys.version, platform.machine(), mesh.device_type, str(mesh.ranks)]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name}: none")
    file = environment.device_file()
    found.append(hashlib.blake2b(file.read_bytes()).hexdigest() if file.is_file() else "no table of devices")
    if mesh.device_type == "cuda" and torch.cuda.is_available():
        one = torch.cuda.get_device_properties(torch.cuda.current_device())
        found.append(f"{one.name} {one.total_memory} {torch.version.cuda}")
    return found
