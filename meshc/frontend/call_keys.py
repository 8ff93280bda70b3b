"""Calls of a program: canonical arguments by name, and the keys under which compilations are memoised."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from meshc.errors import InputError
from meshc.frontend.module_watch import ModuleState
from meshc.frontend.train_step import StepSignature, TracedFunction, TrainStep
from meshc.ir import trees


def name_of(what: object) -> str:
    """The name of what is compiled, as in messages: TrainStep(GPT), GPT, or the name of a function."""
    if isinstance(what, TrainStep):
        return f"TrainStep({type(what.model).__name__})"
    return type(what).__name__ if isinstance(what, nn.Module) else getattr(what, "__name__", type(what).__name__)


def call_module(module: nn.Module, *args: object, **kwargs: object) -> object:
    return module(*args, **kwargs)


def call_inside(path: str, module: nn.Module, *args: object, **kwargs: object) -> object:
    return module.get_submodule(path)(*args, **kwargs)


def canonical_call(
    traced: TracedFunction, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Canonical form of a call: positional arguments by name where the signature names them, so that both ways to call share a compilation.
    Raises InputError for an argument that is passed by position and by name.

    Arguments of the signature's `*args` have no name, and neither have the positional arguments before them.
    """
    parameters = traced.parameters
    if parameters is None:
        return tuple(args), dict(kwargs)
    named = dict(kwargs)
    rest: list[object] = []
    star = next((index for index, one in enumerate(parameters) if one.kind is inspect.Parameter.VAR_POSITIONAL), len(args))
    for position, argument in enumerate(args):
        kind = parameters[position].kind if position < len(parameters) else None
        if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and not rest and len(args) <= star:
            if parameters[position].name in named:
                raise InputError(f"{parameters[position].name} is given twice, by position and by name")
            named[parameters[position].name] = argument
        else:
            rest.append(argument)
    if isinstance(traced.signature, StepSignature):
        traced.signature.check(rest, named)
    order = {parameter.name: index for index, parameter in enumerate(parameters)}
    return tuple(rest), dict(sorted(named.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def has_hooks(called: object) -> bool:
    """Whether `called`, a module or a TrainStep, has the user's hooks around its forward."""
    model = called.model if isinstance(called, TrainStep) else called
    if not isinstance(model, nn.Module):
        return False
    before = [hook for hook in model._forward_pre_hooks.values() if not getattr(hook, "of_meshc", False)]
    return bool(before or model._forward_hooks)


InputKey: TypeAlias = tuple[trees.Spec, tuple[tuple[object, ...], ...]]


def input_key(args: Sequence[object], kwargs: Mapping[str, object]) -> InputKey:
    """Structure, shapes, dtypes and plain values of a call's inputs, hashable."""
    leaves, spec = trees.flatten((tuple(args), dict(kwargs)))
    return (spec, tuple(_leaf_key(leaf) for leaf in leaves))


def _leaf_key(leaf: object) -> tuple[object, ...]:
    if isinstance(leaf, torch.Tensor):
        return ("tensor", tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return ("value", type(leaf), _hashable(leaf))


def describe_inputs(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Inputs as text for messages, and to compare between ranks: `input_ids int64 [4, 16], labels int64 [4, 16]`."""
    lines = []
    for path, leaf in trees.flatten_with_path((tuple(args), dict(kwargs)))[0]:
        name = "".join(str(entry) for entry in path[1:]).replace("['", ".").replace("']", "").lstrip(".")
        if isinstance(leaf, torch.Tensor):
            lines.append(f"{name} {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}")
        else:
            lines.append(f"{name}={leaf!r}")
    return ", ".join(lines) or "nothing"


def unequal_parts(text: str) -> str:
    return (
        f"all parts of a local batch have one shape: {text}\n"
        "  what to do: where numbers of rows differ, drop_last=True in the data loader, or\n"
        "  meshc.Options(local_inputs=meshc.LocalInputs(uneven_rows=True)), which takes parts of any number of rows;\n"
        "  where lengths do, pad all ranks' rows to one (pad_to_multiple_of, or max_length, of a collator)"
    )


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


ModuleKey: TypeAlias = tuple[ModuleState, bool, tuple[tuple[str, torch.dtype], ...]]


def module_key(state: ModuleState, grad: bool) -> ModuleKey:
    """What else of a module decides its program: its state (`ModuleWatch.state`), grad mode and autocast state."""
    return state, grad, autocast_state()


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocast regions around the call: (device, dtype) of each enabled one."""
    return tuple([(device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)])
