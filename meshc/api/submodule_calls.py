"""Submodules of a compiled model with a program each for direct calls; refusal of pipeline stages, and warning of many programs.

    hidden = model.model(input_ids).last_hidden_state       a program of the decoder, over the model's parameters
    rewards = model.score(hidden)                           one of the head; gradients go through both

Their parameters lie on the mesh, where plain inputs do not go together with them. Before the parameters do, their own forward runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from meshc.errors import StateError, join_names
from meshc.frames import warn_at_users_line
from meshc.ir.mesh import Mesh

MANY: Final = 8
"""Number of modules that may have programs without a warning."""


def callable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each that is called, and that holds what a state dict has. Others compute with plain tensors; what is in a
    parametrization is called wherever a parameter is looked at, which means the DTensor."""
    modules = dict(model.named_modules())
    holding = {path for name in _paths_with_state(modules) for path in _enclosing_paths(name)}
    apart = [f"{path}." for path, module in modules.items() if isinstance(module, ParametrizationList)]
    for path, module in modules.items():
        called = type(module).forward is not nn.Module.forward and path in holding
        if called and not any(f"{path}.".startswith(one) for one in apart):
            yield path, module


def _paths_with_state(modules: dict[str, nn.Module]) -> Iterator[str]:
    """Paths of modules that hold a parameter or a buffer that is saved."""
    for path, module in modules.items():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        if any(one is not None for one in module._parameters.values()) or any(module._buffers[name] is not None for name in saved):
            yield path


def _enclosing_paths(path: str) -> Iterator[str]:
    """A path and the paths of its enclosing modules, except the model's own."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def refuse_stages(path: str, model: nn.Module, mesh: Mesh) -> None:
    """Raises StateError on a mesh with pipeline stages, where a module's parameters are stored on its stage only."""
    if (axis := mesh.pipeline_axis) is not None:
        raise StateError(
            f"{path} of this {type(model).__qualname__} is called by itself, and axis {axis.name} has the model in pipeline stages, of "
            "one of which it is a part\n"
            "  what to do: call the model under torch.no_grad(), and take what is wanted from its output (output_hidden_states=True of a\n"
            "  stock model); or compute with the plain module, and its weights of program.state_dict(full=True)"
        )


def warn_of_many(model: nn.Module, paths: Collection[str]) -> None:
    """Warns, at the user's line, of many programs, as from a loop over a model's modules."""
    if len(paths) != MANY + 1:
        return
    warn_at_users_line(
        f"{MANY + 1} modules of this {type(model).__qualname__} have been called by themselves, each of which is a program of its own, "
        f"compiled at its first call: {join_names(list(paths), 4)}\n"
        "  what to do: call the model; or put what is done with them into the forward of a module and compile that: one program, without "
        "what is gathered between them"
    )
