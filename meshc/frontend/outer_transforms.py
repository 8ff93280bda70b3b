"""Refusal of a program's call inside transforms of functions, traces or forward-mode derivatives.

A program is no operator of theirs: they would fail inside of it, on some ranks, or silently give a wrong result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from meshc.errors import StateError
from meshc.private import FakeTensor

_INSIDE: Final = "what to do: apply it to a function of the plain model, and compile that function: meshc.compile(function, mesh, ...)"
_PLAIN: Final = "what to do: give it the module as it was before meshc.compile; {instead}"


def _is_proxy_tracing() -> bool:
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None


AROUND: Final[tuple[tuple[Callable[[], bool], str, str], ...]] = (
    (
        torch.compiler.is_dynamo_compiling,
        "torch.compile",
        'what to do: leave torch.compile out; a program whose operators are compiled by it is meshc.compile(..., backend="inductor")',
    ),
    (lambda: torch._C._functorch.peek_interpreter_stack() is not None, "a transform of torch.func (grad, vmap, jvp, ...)", _INSIDE),
    (
        _is_proxy_tracing,
        "a trace of operators (torch.export, make_fx)",
        _PLAIN.format(instead="print(program) shows the program's own"),
    ),
    (torch.jit.is_tracing, "torch.jit.trace", _PLAIN.format(instead="program.save(path) stores the program")),
)
"""(whether the transform is around the call, its name, what to do)."""


def refuse_around(given: Iterable[object]) -> None:
    """Raises StateError for a call inside such a transform. `given`: the call's arguments."""
    for is_around, name, advice in AROUND:
        if is_around():
            raise StateError(f"{name} is around this call of a compiled module, and cannot see into a program\n  {advice}")
    for tensor in given:
        if not isinstance(tensor, Tensor):
            continue
        if isinstance(tensor, FakeTensor):
            raise StateError(
                "a fake tensor was passed: something traces this call of a compiled module (torch.export, make_fx)\n  "
                + _PLAIN.format(instead="program.save(path) stores the program")
            )
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise StateError(
                "an input has a tangent: forward-mode derivatives are around this call, and a program has none of its own\n"
                "  what to do: use backward, or the module as it was before meshc.compile"
            )
