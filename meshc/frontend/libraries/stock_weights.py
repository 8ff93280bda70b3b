"""Checkpoint files of stock models, renamed and reshaped to the model's own tensors.

    in the files                                            in the model
    model.layers.0.block_sparse_moe.experts.0.w1.weight ┐
    model.layers.0.block_sparse_moe.experts.0.w3.weight ├─> model.layers.0.mlp.experts.gate_up_proj [experts, 2 ffn, hidden]
    ... .experts.1.w1.weight, ...                       ┘
    layers.0.self_attn.q_proj.weight ─────────────────────> model.layers.0.self_attn.q_proj.weight

The mapping is transformers' own table, applied by its own operators; a release without such a table renames nothing. A tensor of one name
in the files is read in parts; a tensor converted from several is built whole, one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.errors import StateError
from meshc.files.weight_files import Weights
from meshc.private import resolve_name

_DONE: Final = "_is_hf_initialized"
"""The mark of transformers on modules and parameters that it does not initialise again."""
CONVERSIONS = "transformers.conversion_mapping:get_model_conversion_mapping"


def weights_by_model_names(model: nn.Module, files: Weights) -> Weights:
    """Files of a stock model under the model's names; those of another model unchanged."""
    if not type(model).__module__.startswith("transformers."):
        return files
    from transformers import PreTrainedModel

    return _ConvertedWeights(model, files) if isinstance(model, PreTrainedModel) else files


class _ConvertedWeights(Weights):
    """`Weights` under the model's names; a tensor that the model does not have keeps its name."""

    def __init__(self, model: Any, files: Weights) -> None:
        super().__init__()
        self._model, self._files = model, files
        self._made: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._sources: dict[str, list[tuple[str, str]]] = {}
        self._converters: dict[str, Any] = {}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        table = resolve_name(CONVERSIONS)(model)
        rename: Callable[..., tuple[str, str | None]] = resolve_name("transformers.core_model_loading:rename_source_key")
        natural: Callable[[str], Any] = resolve_name("transformers.core_model_loading:dot_natural_key")
        converters = [row for row in table if hasattr(row, "operations")]
        renamings = [row for row in table if not hasattr(row, "operations")]
        by_pattern = {pattern: row for row in converters for pattern in row.source_patterns}
        has, prefix = model.state_dict(), model.base_model_prefix
        for name in sorted(files.names, key=natural):
            target, pattern = rename(name, renamings, converters, prefix, has)
            if target not in has and name in has:
                target, pattern = name, None
            if pattern is None:
                self._rows[target if target in has else name] = files, name
            else:
                self._converters[target] = by_pattern[pattern]
                self._sources.setdefault(target, []).append((name, pattern))
        for first in self._sources:
            for target, value in self._convert(first, lambda name: torch.empty(files.shape(name), device="meta")).items():
                self._made[target] = first, tuple(value.shape)
        self.names = (*self._rows, *self._made)

    def _convert(self, first: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """All tensors converted together with `first`, by the model's names. Raises StateError."""
        converter = copy.deepcopy(self._converters[first])
        for name, pattern in self._sources[first]:
            converter.add_tensor(first, name, pattern, read(name))
        try:
            made = converter.convert(first, model=self._model, config=self._model.config)
        except Exception as error:
            names = ", ".join(name for name, _ in self._sources[first][:3])
            raise StateError(f"transformers cannot make {first} of {names}, ...: {type(error).__name__}: {error}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._made[name][1] if name in self._made else super().shape(name)

    def kind(self, name: str) -> str:
        return self._files.kind(self._sources[self._made[name][0]][0][0]) if name in self._made else super().kind(name)

    def slice(self, name: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        if name in self._rows:
            return super().slice(name, ranges)
        return self.tensor(name)[tuple(slice(start, stop) for start, stop in ranges)]

    def tensor(self, name: str) -> Tensor:
        if name in self._rows:
            return super().tensor(name)
        first = self._made[name][0]
        if self._last[0] != first:
            self._last = "", {}  # freed before the next one is built
            self._last = first, self._convert(first, self._files.tensor)
        return self._last[1][name]


@contextmanager
def without_marks(model: nn.Module) -> Iterator[None]:
    """A context in which transformers takes nothing in the model for initialised."""
    owners: list[Any] = [one for one in (*model.modules(), *model.parameters(), *model.buffers()) if getattr(one, _DONE, False)]
    for one in owners:
        setattr(one, _DONE, False)
    try:
        yield
    finally:
        for one in owners:
            setattr(one, _DONE, True)
