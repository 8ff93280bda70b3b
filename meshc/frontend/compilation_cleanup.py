"""Cleanup of torch's state after a compilation: about half a megabyte that is never read again.

    functional_export.__compiled_fn_3_19f80e55_...     the traced graph, its fake tensors and their mode, for a call that never comes
    weakref.finalize(torch.Tensor, invalidate guards)  the guards of a trace, until a Python class or module is freed, so for ever
    <eval_with_key>.17                                 the source of each intermediate graph that was made runnable, for tracebacks
    CompilationMetrics                                 Dynamo's settings (the last 64)

Dynamo writes the compiled function into the globals of the function that it has traced, and export traces a function of a module of
torch's own. A guard on an object is to fail when the object is freed; guards of an export are never evaluated, and are not in Dynamo's
caches. The user's own `torch.compile` has other globals, and keeps its guards; sources and metrics of what another thread traces meanwhile
are removed too.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import weakref
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def clean_up_compilation() -> Iterator[None]:
    """A context for one compilation, at whose end that state is removed."""
    from torch.fx import graph_module

    from meshc.private import dynamo_utils as utils
    from meshc.private import functional_export

    names, sources = vars(functional_export), graph_module._loader.eval_cache
    known_names, known_sources, known_metrics = set(names), set(sources), set(map(id, utils._compilation_metrics))
    try:
        yield
    finally:
        for name in [name for name in list(names) if name.startswith("__") and name not in known_names]:
            del names[name]
        for name in [name for name in list(sources) if name not in known_sources]:
            del sources[name]
            linecache.cache.pop(name, None)
        # all finalizers of the process: there is no other access to those whose creator has not kept them
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            if _guards_code_of(finalizer, names):
                finalizer.detach()
        for metrics in [one for one in list(utils._compilation_metrics) if id(one) not in known_metrics]:
            utils._compilation_metrics.remove(metrics)


def _guards_code_of(finalizer: weakref.finalize[Any, Any], names: dict[str, object]) -> bool:
    """Whether a finalizer is there to invalidate the guards of code with the globals `names`."""
    from meshc.private import CheckFunctionManager

    found = finalizer.peek()
    call = found[1] if found is not None else None
    owner = getattr(call.func, "__self__", None) if isinstance(call, functools.partial) else None
    guards = getattr(owner, "guard_manager", None) if isinstance(owner, CheckFunctionManager) else None
    return (getattr(guards, "global_scope", None) or {}).get("G") is names
