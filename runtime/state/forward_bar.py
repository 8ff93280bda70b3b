"""Forward pre-hook that refuses calls past a compiled module's program: by a trace, by a copy, or of the forward itself.

    model(x)                       runs the program, past this hook: torch calls `_compiled_call_impl` first
    copy.deepcopy(model)(x)        a copy has the DTensors and no program: refused, with the line that compiles it
    pickle.dumps(model)            refused: the file would hold one rank's part of each parameter

`torch.compile(model)` traces forward, and meets the hook too. The hook is removed while meshc traces or copies the model (`calls_allowed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshc.errors import StateError

PAST: Final = (
    "this {name} is compiled, and its own forward was reached past its program\n"
    "  why: its parameters lie on the mesh, where plain inputs do not go together with them\n"
    "  what to do: call the module, or `program`, what meshc.compile returned"
)
COPIED: Final = (
    "this {name} is a copy of a compiled module: it has the DTensors, and no program\n"
    "  what to do: compile what is called, meshc.compile(copy, mesh, args=...), of an average the AveragedModel; copies begin with the "
    "values that they hold"
)
TRACED: Final = (
    "torch.compile is around a compiled module, and would trace its forward in place of its program\n"
    '  what to do: call the module itself; a program whose operators are compiled is meshc.compile(..., backend="inductor")'
)


class ForwardBar:
    """Forward pre-hook that refuses calls; a copy of the hook knows that its module is a copy."""

    of_meshc = True
    """Marks hooks of meshc, which are no part of the model's computation."""

    def __init__(self, before_copy: Callable[[], None] | None = None, is_copy: bool = False) -> None:
        """before_copy: raises where a copy would hold outdated values; is_copy: whether the module is a copy of a compiled one."""
        self.before_copy, self.is_copy = before_copy, is_copy

    def __call__(self, module: nn.Module, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            raise StateError(TRACED)
        if self.is_copy and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return  # copied before anything was compiled, or given plain values since
        raise StateError((COPIED if self.is_copy else PAST).format(name=type(module).__qualname__))

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardBar:
        if self.before_copy is not None:
            self.before_copy()
        return ForwardBar(is_copy=True)

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a compiled module is not pickled: its parameters lie on a mesh, a part of them on each rank\n"
            '  what to do: program.save_pretrained(directory) or program.state_dict(full=True) on every rank, for whole tensors on rank 0; '
            'torch.distributed.checkpoint.save({"program": program}, ...) to go on from'
        )


def bars_of(module: nn.Module) -> list[tuple[int, ForwardBar]]:
    """The bars on a module, with torch's ids of the hooks."""
    return [(number, hook) for number, hook in module._forward_pre_hooks.items() if isinstance(hook, ForwardBar)]


def put_bar(module: nn.Module, bar: ForwardBar) -> None:
    """Puts a bar on a module, in place of earlier ones."""
    take_bars(module)
    module.register_forward_pre_hook(bar)


def take_bars(module: nn.Module) -> list[ForwardBar]:
    """Removes the bars of a module, and returns them."""
    found = bars_of(module)
    for number, _ in found:
        del module._forward_pre_hooks[number]
    return [bar for _, bar in found]
