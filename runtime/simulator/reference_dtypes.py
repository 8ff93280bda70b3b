"""Context in which a model on one device computes in the dtypes of a plan's compute lines, as FSDP2's mixed precision does.

Knows nothing of graphs: parameters are cast when the context is entered, for one forward and its backward, and inputs of the outermost
modules of each line by hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshc.frontend.compute_dtypes import cast_inputs
from meshc.plan.precision_lines import DTYPES, ComputeLine


class ReferenceDtypes:
    """`lines`: those of the whole model; of several that cover a module the last one counts."""

    def __init__(self, module: nn.Module, lines: Sequence[ComputeLine]) -> None:
        self.module = module
        said = {path: [line for line in lines if line.covers(path)][-1:] for path, _ in module.named_modules(remove_duplicate=False)}
        self.dtypes = {path: DTYPES[found[0].compute] for path, found in said.items() if found}
        outer = {path: path.rpartition(".")[0] for path in self.dtypes if path}
        self.entered = [path for path in self.dtypes if not path or said[path] != said[outer[path]]]

    @contextmanager
    def cast_parameters(self) -> Iterator[None]:
        """Parameters are the casts of themselves, through which gradients flow."""
        before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        flat: list[tuple[Any, list[Any]]] = []
        made: dict[int, torch.Tensor] = {}
        try:
            for path, dtype in self.dtypes.items():
                owner: Any = self.module.get_submodule(path)
                kept = dict(owner._parameters)
                before.append((owner._parameters, kept))
                for name, value in kept.items():
                    if value is not None and value.is_floating_point():
                        owner._parameters[name] = made.setdefault(id(value), value.to(dtype))
                if hasattr(owner, "_flat_weights"):  # recurrent layers have a list of their own
                    flat.append((owner, owner._flat_weights))
                    owner._flat_weights = [made.get(id(value), value) for value in owner._flat_weights]
            with cast_inputs(self.module, {path: self.dtypes[path] for path in self.entered}):
                yield
        finally:
            for store, kept in reversed(before):
                store.update(kept)
            for owner, weights in flat:
                owner._flat_weights = weights
