"""Code for one library each: transformers, its Trainer, Accelerate, peft.

    TRACEABLE    library -> what of this folder a trace enters, in a process that has imported the library

Nothing here imports a library that the process has not: a file either looks into `sys.modules`, or is imported for models of that library.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Final

from torch import nn

TRACEABLE: Final[Mapping[str, str]] = {"transformers": "stock_models:traceable", "peft": "adapted_experts:adapted_experts"}
"""Library -> its file and the context in there, of a model."""
STATE: Final[Mapping[str, tuple[str, ...]]] = {
    "peft.tuners.tuners_utils.BaseTunerLayer": ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling"),
}
"""Attributes that a library changes between calls, by the full name of the class that has them (so that nothing is imported to look)."""


@contextmanager
def traceable_libraries(model: nn.Module) -> Iterator[None]:
    """A context in which the code of imported libraries is in the form in which it is traced."""
    with ExitStack() as stack:
        for library, place in TRACEABLE.items():
            if library in sys.modules:
                file, _, context = place.partition(":")
                stack.enter_context(getattr(import_module(f"{__name__}.{file}"), context)(model))
        yield
