"""Pretrained weights of other libraries, loaded into a compiled model and saved from it.

    dir/model-00001-of-00002.safetensors ── what this rank's tiles cover ──> buffers of the program
    buffers ── whole tensors, one at a time, on rank 0 ──> model.save_pretrained(dir) ──> what plain transformers loads
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshc.errors import ArtifactError, StateError
from meshc.files.folders import may_replace, move_into_place, replacing, writing
from meshc.files.weight_files import WeightFiles
from meshc.frontend import model_init
from meshc.frontend.libraries import adapters, stock_weights
from meshc.runtime.saved import weight_loading

if TYPE_CHECKING:
    from meshc.api.handle import Program

_DESCRIBES = "config.json"
_WEIGHTS = ("model", "pytorch_model", "adapter_model")


def load_pretrained(program: Program, path: str | os.PathLike[str], *, adapter: str | None = None) -> None:
    """Read pretrained weights into a compiled model, each rank no more than its own part of them.

    path   a safetensors file, or a folder with `model.safetensors` or several files and `model.safetensors.index.json`, as
           `save_pretrained` writes and the hub keeps; or the name of a model on the hub, which rank 0 of each machine downloads. A
           folder with `adapter_config.json` and `adapter_model.safetensors`, as peft keeps an adapter, is read into the model's adapter,
           and touches nothing else; files of a base model go into a model with adapters under the names that it has there
    adapter  which of several adapters of the model the files are for

    Values are cast to the dtype that the model has. A stock model's names and shapes may be those of an older release, as transformers
    converts them (of experts, say, which files keep one by one); beyond its own part a rank then holds the largest converted tensor. On a
    model that was built on `meta` this gives values to the buffers that no file holds too (rotary tables), by the stock model's own
    `_init_weights`. Optimizer state that begins as a copy of a parameter begins again. All ranks call it.

    Raises ArtifactError for files that are missing, pickled or damaged; StateError, before anything is changed, for shapes that do not
    fit, for an adapter that the model does not have or has with another scale, for parameters from `meta` that the files have no values
    for, and for a program without a process group. Warns of names that only the model has, which keep their values, and of names that
    only the files have.
    """
    program.world.refuse_call()
    with program.world.together("load_pretrained"):
        store, found = program.store, _on_disk(program, path)
        has = adapters.adapters_of(store.model)
        with WeightFiles(found) as files:
            if adapters.is_adapter(found):
                name = adapters.select_adapter(store.model, found, adapter)
                weights = adapters.adapter_weights(store.model, files, name)
                weight_loading.load(store, weights, str(path), lambda one: adapters.belongs_to_adapter(one, [name]))
            elif has:
                weights = adapters.base_weights(store.model, files)
                weight_loading.load(store, weights, str(path), lambda one: not adapters.belongs_to_adapter(one, has))
            else:
                weight_loading.load(store, stock_weights.weights_by_model_names(store.model, files), str(path))
        fill = model_init.of_one_module(store.model)
        if fill is not None and store.unfilled_names:
            weight_loading.fill_buffers(store, fill)


def _on_disk(program: Program, path: str | os.PathLike[str]) -> Path:
    """The path if it exists; else the folder downloaded from the hub, if it looks like a name on the hub."""
    name = os.fspath(path)
    if os.path.exists(name) or name.count("/") > 1 or name.startswith((".", "~")) or os.path.isabs(name):
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        advice = "what to do: give the path of a folder with safetensors files, or pip install huggingface_hub"
        raise ArtifactError(f"there is no folder {name}, and no huggingface_hub to look for it on the hub\n  {advice}") from None

    def download() -> str:
        try:
            return str(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
        except Exception as error:  # of many kinds: no network, no such model, no leave
            raise ArtifactError(
                f"there is no folder {name}, and the hub does not give a model of that name: {type(error).__name__}: {str(error)[:300]}\n"
                "  what to do: give the path of a folder with safetensors files"
            ) from None

    found = Path(program.world.from_rank_0(download))
    return found if found.exists() else Path(download())  # on another machine


def save_pretrained(program: Program, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """`Program.save_pretrained`."""
    program.world.refuse_call()
    model = program.store.model
    save = getattr(model, "save_pretrained", None)
    if save is None:
        raise StateError(
            f"{type(model).__qualname__} has no save_pretrained of its own\n"
            '  what to do: state = program.state_dict(full=True) on every rank, and torch.save(state["model"], path) on rank 0'
        )
    target = Path(os.path.realpath(path))
    has = adapters.adapters_of(model)
    described_by = adapters.CONFIG if has else _DESCRIBES

    def check() -> None:
        if not may_replace(target, described_by):
            raise StateError(f"{path} exists and holds no {described_by}: it is not replaced; remove it or choose another path")

    program.world.from_rank_0(check)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = program.store.whole_model((lambda name: name in trained or adapters.belongs_to_adapter(name, has)) if has else None)

    def write() -> None:
        with writing(target), replacing(target) as made:
            save(made, state_dict=whole, **kwargs)
            for old in target.iterdir() if target.exists() else ():
                if not (made / old.name).exists() and not old.name.startswith(_WEIGHTS):
                    (shutil.copytree if old.is_dir() else shutil.copy2)(old, made / old.name)
            move_into_place(made, target)

    program.world.from_rank_0(write)

