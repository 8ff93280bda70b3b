"""Hooks of an optimizer's step in a compiled step: post hooks are run after the call, pre hooks are refused.

    optimizer.register_step_post_hook(clamp_weights)       after each call of the program
    optimizer.register_step_pre_hook(scale_gradients)      refused: gradients are not available between backward and the update
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from meshc.errors import StateError
from meshc.optimizer.optimizer_set import AnyOptimizer, with_wrappers


def refuse_pre_hooks(optimizer: AnyOptimizer) -> None:
    """Raises StateError for hooks of users that would run between backward and the update."""
    for one in with_wrappers(optimizer):
        found = [hook for hook in getattr(one, "_optimizer_step_pre_hooks", {}).values() if not getattr(hook, "of_meshc", False)]
        if found:
            names = ", ".join(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in found)
            raise StateError(
                f"{type(one).__qualname__} has a hook ahead of its step (register_step_pre_hook): {names}\n"
                "  why: backward and update are one program, and nothing of Python runs between them\n"
                "  what to do: what changes a gradient: parameter.register_hook(...); what changes rates: before the call of the program;\n"
                "  what only looks at gradients: Options(training=Training(keep_gradients=True)), after it"
            )


def post_hooks(optimizer: AnyOptimizer) -> list[Callable[[], Any]]:
    """Users' post-step hooks, bound to their optimizers, in the order of calls."""
    return [
        partial(hook, one, (), {})
        for one in with_wrappers(optimizer)
        for hook in getattr(one, "_optimizer_step_post_hooks", {}).values()
    ]
