"""Key of a compilation in the on-disk cache: one hash of all that its program depends on, except what its trace reads of Python.

    what ranks agree on     versions, torch's settings, mesh, plan, options, inputs, the model's state, the optimizer (runtime.agreement)
    what the passes get     every field of the request: which function is traced, where the model's state lies already
    what the model is       its modules' classes, and the numbers, flags and texts that they and their configurations hold
    what else               installed libraries, the table of devices, the machine's GPUs

What a trace has read stands in the entry, and is looked at again (`meshc.api.cache_entry`). A function that the passes call, a schedule or
a rule, is traced by nobody, so there is no key for it.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
from torch import nn

from meshc import environment
from meshc.frontend.portable_values import is_plain
from meshc.frontend.traced_code import digest_of, name_of
from meshc.ir.mesh import Mesh
from meshc.ops.registered import RULES
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.options import Options
from meshc.passes.phases.request import Request
from meshc.runtime.agreement.descriptions import FOLDERS, stable

LIBRARIES: Final = ("torch", "numpy", "scipy", "sympy", "triton", "safetensors", "transformers", "peft", "accelerate")
"""Whose files are compared by their versions, or decide something of a program."""
TOLD_OTHERWISE: Final = ("module", "args", "kwargs", "optimizer", "mesh", "plan", "options")
"""Fields of a request that are objects, of which the rest of the key says what they are."""


def key(options: Options, agreed: Mapping[str, str], request: Request) -> str:
    """Key in hexadecimal digits; "" if there is none."""
    if why_none(options):
        return ""
    state = hashlib.blake2b(digest_size=16)

    def take(*words: str) -> None:
        for word in words:
            data = word.encode()
            state.update(len(data).to_bytes(8, "big") + data)

    for field in sorted(agreed):
        take(field, agreed[field])
    for one in fields(request):
        if one.name not in TOLD_OTHERWISE:
            take(one.name, stable(getattr(request, one.name)))
    take(*(f"{name} {stable(value)}" for name, value in request.options.by_name().items() if name not in FOLDERS))
    take(describe_optimizer(request.optimizer), *_modules(request.module), *_machine(request.mesh))
    return state.hexdigest()


def why_none(options: Options) -> str:
    """Reason why there is no key; "" if there is one."""
    if callable(options.pipeline.schedule):
        return options.as_written("Options(pipeline=Pipelining(schedule=)) is a function, and what it reads is not known")
    ours = [str(op) for op, given in RULES.items() if any(map(callable, (given.rule, *given.fields.values())))]
    return f"the rule of {ours[0]} is a function, and what it reads is not known" if ours else ""


def describe_optimizer(spec: OptimizerSpec | None) -> str:
    """A digest of its state's form, and of the update of a class that is not torch's, which each process has traced for itself."""
    if spec is None:
        return ""
    slots = [[[(s.name, s.shape, s.size, s.dtype, s.fill, s.python) for s in one] for one in group.slots] for group in spec.groups]
    updates = [(size, str(one.graph.graph), one.inputs, one.outputs) for group in spec.groups for size, one in group.traced.items()]
    return digest_of(repr((slots, updates)).encode())


def _modules(model: nn.Module) -> Iterator[str]:
    """What modules and their configurations are and hold that is plain: recognisers of what a model is look at it, and no trace."""
    for path, module in model.named_modules():
        for held in (module, getattr(module, "config", None)):
            plain = {name: repr(value) for name, value in getattr(held, "__dict__", {}).items() if name[0] != "_" and is_plain(value)}
            yield f"{path}: {name_of(type(held))} {sorted(plain.items())}"


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
