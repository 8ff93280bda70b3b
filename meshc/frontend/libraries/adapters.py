"""Weights of peft adapters and of their base models, renamed to a model's own names.

    adapter_config.json, adapter_model.safetensors         in the model
    base_model.model.layers.0.q_proj.lora_A.weight ──────> base_model.model.layers.0.q_proj.lora_A.default.weight
    base_model.model.score.weight ───────────────────────> base_model.model.score.modules_to_save.default.weight

    the base model's files
    layers.0.q_proj.weight ──────────────────────────────> base_model.model.layers.0.q_proj.base_layer.weight

A name is matched against the model's state dict, so that it does not matter whether peft wrapped the model or put adapters into it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from meshc.errors import ArtifactError, StateError
from meshc.files.weight_files import Weights
from meshc.ir.bounds import parse_json, read_text

CONFIG: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
_MEANING: Final = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "bias")
"""Entries of an adapter's configuration that say what its weights mean in the model."""


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """The configurations of a model's adapters, by adapter name; {} for a model without adapters."""
    found = getattr(model, "peft_config", None)
    return dict(found) if isinstance(found, Mapping) else {}


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (path / CONFIG).is_file()


def select_adapter(model: nn.Module, path: Path, adapter: str | None) -> str:
    """The name of the model's adapter that the files in the folder `path` are for. Raises StateError where the model has no adapter, where
    it has several and `adapter` names none of them, and where the folder's configuration gives the weights another meaning than the model's
    does; ArtifactError for a configuration that cannot be read."""
    has = adapters_of(model)
    if not has:
        raise StateError(
            f"{path} holds an adapter, and the model has none\n"
            f"  what to do: before you compile it, model = peft.get_peft_model(model, peft.PeftConfig.from_pretrained({str(path)!r}))"
        )
    name = adapter or (next(iter(has)) if len(has) == 1 else None)
    if name is None or name not in has:
        raise StateError(f"the model has the adapters {', '.join(sorted(has))}\n  what to do: load_pretrained(..., adapter=one of them)")
    _compare(path, has[name], name)
    return name


def _compare(path: Path, mine: Any, name: str) -> None:
    theirs = parse_json(read_text(path / CONFIG), str(path / CONFIG))
    if not isinstance(theirs, dict):
        raise ArtifactError(f"{path / CONFIG} is no adapter's configuration\n  what to do: download or copy it again")
    other = []
    for key in _MEANING:
        have = mine.get(key) if isinstance(mine, Mapping) else getattr(mine, key, None)
        have = getattr(have, "value", have)  # peft's types are enumerations
        if key in theirs and have is not None and (theirs[key] or None) != (have or None):
            other.append(f"{key} is {json.dumps(theirs[key])}, of the model's adapter {name} it is {json.dumps(have, default=str)}")
    if other:
        raise StateError(
            f"the adapter in {path} means something else than the model's:\n    " + "\n    ".join(other) + "\n"
            f"  what to do: build the model's from it, peft.PeftConfig.from_pretrained({str(path)!r})"
        )


def adapter_weights(model: nn.Module, files: Weights, adapter: str) -> Weights:
    """An adapter's files under the model's names; a tensor that the model does not have keeps its name."""
    has = frozenset(model.state_dict())
    return Weights({next((one for one in _with_adapter(name, adapter) if one in has), name): (files, name) for name in files.names})


def _with_adapter(name: str, adapter: str) -> Iterator[str]:
    for plain in (name, name.removeprefix(_PREFIX)):
        parts = plain.split(".")
        for at in range(len(parts), 0, -1):
            yield ".".join([*parts[:at], adapter, *parts[at:]])
            yield ".".join([*parts[:at], "modules_to_save", adapter, *parts[at:]])


def belongs_to_adapter(name: str, adapters: Iterable[str]) -> bool:
    """Whether a name of the model belongs to one of `adapters`."""
    return any(f".{adapter}." in f".{name}." for adapter in adapters)


def base_weights(model: nn.Module, files: Weights) -> Weights:
    """A base model's files under the names that the tensors have in a model with adapters."""
    renamed: dict[str, str] = {}
    given = frozenset(files.names)
    for name in model.state_dict():
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        source = next((one for one in (name, plain, plain.removeprefix(_PREFIX)) if one in given), None)
        if source is not None:
            renamed[name] = source
    taken = frozenset(renamed.values())
    renamed |= {name: name for name in files.names if name not in taken}
    return Weights({name: (files, source) for name, source in renamed.items()})
