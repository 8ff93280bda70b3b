"""Models exported by `torch.export`, prepared for tracing: an ExportedProgram, or its `module()`.

    _guards_fn(x)                                  removed: meshc itself compares a call's inputs with those of the export
    torch.ops.aten.dropout.default(h, 0.1, True)   torch.nn.functional.dropout(h, 0.1, True): numbered draws, or an operator of meshc's

What the export has fixed stays fixed: the mode, and every size that was not dynamic.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.nn import functional

from meshc.errors import CaptureError, InputError
from meshc.frontend.traced_code import name_of
from meshc.ir.functions import Function
from meshc.private import HigherOrderOperator, OpOverload

aten = torch.ops.aten
PROGRAM: Final = "torch.export.exported_program.ExportedProgram"
MODULE: Final = "torch.export._unlift._StatefulGraphModule"
_GUARDS: Final = "_guards_fn"
_HOOK: Final = "_check_input_constraints_pre_hook"
_ADVICE: Final = "give meshc the module that torch.export.export was given; meshc exports it for the mesh"

RESTORED: Final[Mapping[object, Function]] = {
    aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    aten.dropout.default: functional.dropout,
    aten.feature_dropout.default: functional.dropout2d,
    aten.alpha_dropout.default: functional.alpha_dropout,
    aten.rand.default: torch.rand,
    aten.randn.default: torch.randn,
    aten.rand_like.default: torch.rand_like,
    aten.randn_like.default: torch.randn_like,
}
"""Operators of exported graphs -> torch's functions with the same meaning and arguments."""


def prepare_export(what: Any) -> Any:
    """What is compiled in the place of `what`: for an ExportedProgram its module, prepared for tracing; the module of one is prepared in
    place; anything else is returned as it is. Raises CaptureError for regions and random operators that cannot be traced from such a
    graph."""
    if _is_a(what, PROGRAM):
        what = what.module()
    model = getattr(what, "model", what) if type(what).__name__ == "TrainStep" else what
    if _is_a(model, MODULE):
        _prepare_module(model)
    return what


def examples(what: Any) -> tuple[tuple[object, ...], dict[str, object]]:
    """(args, kwargs) of the example inputs of an ExportedProgram; empty for anything else."""
    held = what.example_inputs if _is_a(what, PROGRAM) else None
    return ((), {}) if held is None else (tuple(held[0]), dict(held[1]))


def is_module(what: object) -> bool:
    """Whether `what` is the module of an ExportedProgram."""
    return _is_a(what, MODULE)


def refuse_other_inputs(model: nn.Module, named: Sequence[tuple[str, object]]) -> None:
    """Refuses inputs that differ from those of the export of an ExportedProgram's module. `named`: paths and leaves. Raises InputError."""
    graph: Any = model.graph
    takes = inspect.signature(model.forward).parameters
    leaves = [(name, leaf) for name, leaf in named if re.split(r"[.\[]", name)[0] in takes]
    wanted = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    if len(leaves) != len(wanted):
        leaves = [(name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor)]
        wanted = [value for value in wanted if isinstance(value, Tensor)]
    faults = [fault for (name, leaf), value in zip(leaves, wanted, strict=False) if (fault := _difference(name, leaf, value))]
    if faults or len(leaves) != len(wanted):
        raise InputError(
            f"the model was exported for other inputs: {'; '.join(faults) or f'{len(wanted)} of them, not {len(leaves)}'}\n"
            "  why: the graph that torch.export has made holds for these alone\n"
            f"  what to do: export it with dynamic_shapes for what varies; or {_ADVICE}"
        )


def _difference(name: str, leaf: object, value: object) -> str:
    if isinstance(value, Tensor):
        if not isinstance(leaf, Tensor):
            return f"{name} was a tensor"
        told = [size if type(size) is int else "any" for size in value.shape]
        same = len(leaf.shape) == len(told) and all(size in ("any", here) for size, here in zip(told, leaf.shape, strict=True))
        if not same or leaf.dtype is not value.dtype:
            return f"{name} is {leaf.dtype} of shape {list(leaf.shape)}, and was {value.dtype} of {told}"
    elif not isinstance(value, SymInt | SymFloat | SymBool) and (isinstance(leaf, Tensor) or leaf != value):
        return f"{name} is {leaf!r}, and was {value!r}"
    return ""


def _prepare_module(module: Any) -> None:
    graph: fx.Graph = module.graph
    faults = [fault for node in graph.nodes if (fault := _fault(node))]
    if faults:
        raise CaptureError(
            "the exported graph holds what meshc cannot take from it:\n    " + "\n    ".join(dict.fromkeys(faults)) + "\n"
            f"  what to do: {_ADVICE}"
        )
    for node in list(graph.nodes):
        if node.op == "call_module":
            graph.erase_node(node)
        elif node.target in RESTORED:
            node.target = RESTORED[node.target]
    for key, hook in list(module._forward_pre_hooks.items()):
        if getattr(hook, "__name__", "") == _HOOK:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    module.recompile()


def _fault(node: fx.Node) -> str:
    if node.op == "call_module" and node.target != _GUARDS:
        return f"{node.name}: a call of {node.target}"
    if isinstance(node.target, HigherOrderOperator):
        return f"{node.name}: a region ({node.target.name()})"
    if isinstance(node.target, OpOverload) and node.target not in RESTORED and torch.Tag.nondeterministic_seeded in node.target.tags:
        return f"{node.name}: random numbers ({node.target})"
    return ""


def _is_a(what: object, name: str) -> bool:
    return name in map(name_of, type(what).__mro__)
