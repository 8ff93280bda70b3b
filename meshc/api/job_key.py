"""Description of a compilation by field, on which ranks agree, and its key in the on-disk cache: one hash of this and of all else that its
program depends on, except what its trace reads of Python.

    what ranks agree on     versions, torch's settings, mesh, plan, options, inputs, the model's state, the optimizer
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
from meshc.api.compile_arguments import Arguments, CompilationKey, CompileArguments, OptimizerKey
from meshc.frontend import call_keys
from meshc.frontend.gradient_hooks import hooks_in
from meshc.frontend.portable_values import is_plain
from meshc.frontend.traced_code import digest_of, name_of
from meshc.frontend.train_step import TrainStep
from meshc.ir.mesh import Mesh
from meshc.ops import registered
from meshc.ops.registered import RULES
from meshc.optimizer.optimizer import OptimizerSpec, numbers
from meshc.options import Options
from meshc.passes.phases.request import Request
from meshc.runtime.agreement.descriptions import EVALUATION, FOLDERS, FROZEN, INPUTS, describe_environment, entries_text, stable

LIBRARIES: Final = ("torch", "numpy", "scipy", "sympy", "triton", "safetensors", "transformers", "peft", "accelerate")
"""Whose files are compared by their versions, or decide something of a program."""
TOLD_OTHERWISE: Final = ("module", "args", "kwargs", "optimizer", "mesh", "plan", "options")
"""Fields of a request that are objects, of which the rest of the key says what they are."""


def describe_compilation(asked: CompileArguments, inputs: Arguments, key: CompilationKey) -> dict[str, str]:
    """The fields of a compilation that a call is about to start, under this key."""
    (_, leaves), (_, grad, autocast), optimizer = key.inputs, key.module, key.optimizer
    found = {**describe_environment(), **_describe_request(asked), **_model(asked.module)}
    if asked.step is not None:
        found |= _step(asked.step, asked.module, optimizer)
    found |= {"grad mode": str(grad), "autocast": stable(autocast)}
    found["the inputs that take gradients"] = ", ".join(str(i) for i, leaf in enumerate(leaves) if leaf[0] == "tensor" and leaf[-1])
    return {**found, INPUTS: call_keys.describe_inputs(*inputs)}


def _describe_request(asked: CompileArguments) -> dict[str, str]:
    """The arguments of `meshc.compile` beside the model and its inputs."""
    found = {"what is compiled": type(asked.what).__qualname__ if isinstance(asked.what, TrainStep | nn.Module) else "a function"}
    found["the module that is called"] = asked.path or "the model"
    found |= {"the mesh": str(asked.mesh), "the plan": "; ".join(str(asked.plan).replace("; ", ", ").splitlines())}
    found["names="] = stable(asked.names)
    found |= {f"{name}=": getattr(asked, name) for name in ("inputs", "outputs", "backend")}
    found["the registered rules"] = stable(registered.by_name())
    return found | {f"the option {name}": stable(value) for name, value in asked.options.by_name().items() if name not in FOLDERS}


def _model(module: nn.Module) -> dict[str, str]:
    """Parameters and buffers by name, dtype and shape, and the flags that are part of a program's cache key."""
    parameters = dict(module.named_parameters())
    tensors = [(name, f"{t.dtype} {list(t.shape)}") for name, t in (*parameters.items(), *module.named_buffers())]
    modules = dict(module.named_modules())
    return {
        "the model": entries_text(tensors),
        EVALUATION: _names_text([name or "the model itself" for name, m in modules.items() if not m.training], len(modules)),
        FROZEN: _names_text([name for name, p in parameters.items() if not p.requires_grad], len(parameters)),
    }


def _step(train_step: TrainStep, module: nn.Module, key: OptimizerKey) -> dict[str, str]:
    """The fields of a TrainStep. key: its optimizer's flags, and branches on numbers."""
    names = {id(p): name for name, p in module.named_parameters()}
    groups = train_step.optimizers.param_groups
    held = [(f"group {i}", ", ".join(names.get(id(p), "another's") for p in group["params"])) for i, group in enumerate(groups)]
    return {
        **{f"{name}=": stable(getattr(train_step, name)) for name in ("clip_grad_norm", "clip_grad_value", "microbatches", "batch_mix")},
        "scaler=": stable(train_step.scaling is not None),
        "the gradient hooks": entries_text((name, hooks.names()) for name, hooks in hooks_in(module).items()),
        "the optimizer": entries_text(key),
        "the optimizer's parameters": entries_text(held),
        "the optimizer's numbers": entries_text(
            (f"{name} of group {i}", value) for i, row in enumerate(numbers(train_step.optimizers)) for name, value in row.items()
        ),
    }


def _names_text(names: list[str], count: int) -> str:
    return "none" if not names else f"all {count}" if len(names) == count else "; ".join(names)


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
